// From a job's views to a source of units: checks, coalescing. Place: engine, internal.
// Owns the scratch that coalescing needs; used by the engine's thread only.
#pragma once

#include <optional>

#include "zensync/engine/engine.hpp"
#include "zensync/kernels/kernels.hpp"

namespace zensync {

TensorSpec spec_of(const JobSpec& job);

/// kInvalid: `bytes` bytes of output are not there, or overlap the input.
Status check_output(const void* data, std::uint64_t bytes, const DenseView& input);

class Preparer {
 public:
  explicit Preparer(const kernels::Table& table) : table_(table) {}

  /// Checks the view before anything is sent. Errors:
  ///  - kInvalid: null pointers, rows out of range or out of order (`ids`), a size that overflows;
  ///  - kUnsupported: AVG of integers;
  ///  - kCapacity: more than 2^32 entries.
  Status check(const JobSpec& job) const;
  /// The source for units of `width` elements; valid until the next call.
  UnitSource source(const JobSpec& job, std::uint64_t width);

 private:
  UnitSource coo_source(const CooView& view, std::uint64_t width);
  const kernels::Table& table_;
  kernels::CoalesceScratch scratch_;
  Array<std::uint64_t> rows_;
  Buffer sums_;
};

}  // namespace zensync
