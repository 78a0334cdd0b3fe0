// Where sums go: into the caller's dense tensor, or into a growing COO result. Only the union is
// written. Counts the union and its histogram on the way (equal on all ranks).
// Place: scheme, level 3; one per job.
// Owner: dense memory is the caller's; a COO result is the sink's. A COO sink keeps pointers to
// what it was given until `end_chunk`, so the sets put since the last call must still be there
// then.
// Threads: one at a time; a COO result may be read by any once the job has ended.
// Fails with kCorruptMessage (a COO row that came in part only) and std::bad_alloc.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "zensync/base/buffer.hpp"
#include "zensync/base/plan.hpp"
#include "zensync/base/result.hpp"
#include "zensync/codec/sparse_set.hpp"
#include "zensync/kernels/kernels.hpp"
#include "zensync/partition/partition.hpp"

namespace zensync {

/// Slots [slot_lo, …) of `owner`: where a set of units belongs.
struct Region {
  const Partition* partition = nullptr;
  Rank owner;
  std::uint64_t slot_lo = 0;
};

class UnitSink {
 public:
  /// Writes into `data`, dense-stored.
  void start_dense(void* data, std::size_t unit_bytes);
  /// Collects rows of `parts` units each.
  void start_coo(std::uint64_t parts, std::size_t unit_bytes);

  /// `set` holds final values (in the tensor's dtype) of units of `region`.
  void put(const kernels::Table& table, const Region& region, const SparseSet& set);
  /// All sets of one chunk have been put. Errors: kCorruptMessage (a row came in part only).
  Status end_chunk();

  /// Whether every row that was begun is whole (COO); asked once, when all chunks have ended.
  bool is_complete() const {
    return data_ != nullptr || values_.size() == rows_.size() * parts_ * unit_bytes_;
  }

  const Array<std::int64_t>& rows() const { return rows_; }
  const Buffer& values() const { return values_; }
  std::uint64_t union_units() const { return union_units_; }
  const std::vector<std::uint64_t>& histogram() const { return histogram_; }

 private:
  struct Entry {
    UnitId unit;
    const std::byte* value;
  };
  void count(const Region& region, const SparseSet& set);
  /// Fills `at_` with the units of `run`, relative to the unit that it returns.
  UnitId locate(const Region& region, const SparseSet& set, const BlockRun& run);
  void collect(const Region& region, const SparseSet& set);
  void merge_lists();

  std::byte* data_ = nullptr;  ///< null: COO
  std::size_t unit_bytes_ = 0;
  std::uint64_t parts_ = 1;
  std::uint64_t union_units_ = 0;
  std::vector<std::uint64_t> histogram_;
  Array<std::uint32_t> at_;
  std::vector<Entry> entries_;
  std::vector<Entry> merged_;
  std::vector<std::size_t> list_ends_;
  Array<std::int64_t> rows_;
  Buffer values_;
};

}  // namespace zensync
