// Where a rank's units come from: scanned (dense-stored; each range is searched for non-zero units
// as it is needed, so that values are still in the cache when they are encoded) or listed (rows
// known beforehand: COO, `rows=`).
// Place: scheme, level 3; the engine makes one for each job.
// Owner: a view; nothing here is owned, and the memory behind it outlives the job. A search writes
// +0.0 over −0.0 in the caller's memory, else nothing is written.
// Threads: one at a time. Cannot fail, but for std::bad_alloc from the array handed in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zensync/base/buffer.hpp"
#include "zensync/base/types.hpp"
#include "zensync/kernels/kernels.hpp"

namespace zensync {

/// Units found in one range; their places relative to the range are in the array handed in.
struct Found {
  const void* base = nullptr;  ///< unit i lies at base + at × unit_bytes
  std::size_t count = 0;
  bool packed = false;  ///< at = order among the found; else at = place relative to the range
};

/// Rows known beforehand: `rows[i]`, ascending and distinct, each `parts` units.
struct RowList {
  const std::uint64_t* rows = nullptr;
  std::uint64_t count = 0;
  std::uint64_t parts = 1;
};

class UnitSource {
 public:
  /// Dense-stored, to be searched; the search writes +0.0 over −0.0.
  static UnitSource scanned(void* data, std::uint64_t width, DType dtype);
  /// The units of `list`; values packed in its order, or (`dense`) at their places in a dense
  /// tensor.
  static UnitSource listed(const void* values, const RowList& list, std::uint64_t width,
                           DType dtype, bool dense);

  DType dtype() const { return dtype_; }
  std::uint64_t width() const { return width_; }
  std::size_t unit_bytes() const { return width_ * dtype_bytes(dtype_); }
  bool is_scanned() const { return scan_ != nullptr; }

  /// The units of [begin, end), end − begin < 2^32; `rel` is resized.
  Found find(const kernels::Table& table, UnitId begin, UnitId end, Array<std::uint32_t>& rel);
  /// The least unit ≥ `from` that may be there; a huge number if none.
  UnitId next(UnitId from) const;

 private:
  std::uint64_t lower_row(std::uint64_t row) const;
  void* scan_ = nullptr;
  const void* values_ = nullptr;
  bool dense_ = false;
  RowList rows_;
  std::uint64_t width_ = 1;
  DType dtype_ = DType::kF32;
};

}  // namespace zensync
