// A set of units with values, in the form that all schemes compute on: runs of blocks, 16-bit
// offsets, values. Offsets ascend within a block, blocks ascend.
// Place: codec, level 2; read from messages, added by schemes, written back by a sink.
// Owner: runs, offsets and `storage` are its own and are kept when it is cleared. `values` may
// point into a received message (then the set is good as long as that buffer) or into `storage`.
// Threads: one at a time. Nothing here checks or fails: sets from peers were checked by `read_set`.
#pragma once

#include <cstdint>
#include <vector>

#include "zensync/base/buffer.hpp"
#include "zensync/base/types.hpp"

namespace zensync {

/// `count` units of block `block`; their offsets start at `begin` in SparseSet::offsets.
struct BlockRun {
  std::uint64_t block = 0;
  std::uint32_t begin = 0;
  std::uint32_t count = 0;
};

struct SparseSet {
  std::vector<BlockRun> runs;
  Array<std::uint16_t> offsets;
  DType values_dtype = DType::kF32;
  const void* values = nullptr;  ///< units × width elements of values_dtype
  Buffer storage;

  std::uint32_t units() const { return runs.empty() ? 0 : runs.back().begin + runs.back().count; }
  void clear() {
    runs.clear();
    offsets.clear();
    values = nullptr;
    storage.clear();
  }
};

}  // namespace zensync
