// A set of units with values, in the form that all schemes compute on: runs of blocks, 16-bit
// offsets, values. Place: codec, level 2. Offsets ascend within a block, blocks ascend. `values`
// may point into a received message (then the set lives as long as that buffer) or into `storage`.
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
