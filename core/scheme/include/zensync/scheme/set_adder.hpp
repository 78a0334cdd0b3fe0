// Adds sets of units in a fixed order.
// Place: scheme, level 3. Block by block: the union of the sets' offsets as a bitmap of 2 KiB, a
// table from offset to place, then one scatter-add per set, in order. Work is O(units received +
// blocks met): blocks that nobody sent cost nothing, so no memory or time grows with the number of
// slots. Sums start from +0.0; cancelled units stay members.
// Owner: it owns its scratch and keeps it; sets are the caller's, and `out` gets storage of its
// own.
// Threads: one at a time. Sets were checked before; fails with std::bad_alloc only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "zensync/codec/sparse_set.hpp"
#include "zensync/kernels/kernels.hpp"

namespace zensync {

class SetAdder {
 public:
  /// out = sets[0] + sets[1] + … (in this order, per element), units of `width` elements; all sets
  /// have values of `dtype` or of sum_dtype(dtype); out.values_dtype = sum_dtype(dtype), values in
  /// out.storage.
  void add(const kernels::Table& table, std::span<const SparseSet* const> sets, std::uint64_t width,
           DType dtype, SparseSet& out);

 private:
  void unite_block(std::span<const SparseSet* const> sets, std::uint64_t block, SparseSet& out);
  void add_block(const kernels::Table& table, std::span<const SparseSet* const> sets,
                 std::uint64_t width, SparseSet& out);

  static constexpr std::size_t kWords = kernels::kBlockSlots / 64;
  std::vector<std::size_t> cursors_;
  std::uint64_t words_[kWords] = {};
  Array<std::uint32_t> places_;  ///< offset → place in out
  Array<std::uint32_t> at_;
};

}  // namespace zensync
