// Plain structs about one tensor: what it is, what all ranks know of its sparsity, what was chosen
// for it.
// Place: base, level 0, so that schemes (level 3) and the planner (level 4) share them.
// Values: they own their vectors, are copied freely, and have no behaviour and no threads.
// What they hold is equal on all ranks at the same job; plans are functions of nothing else.
#pragma once

#include <cstdint>
#include <vector>

#include "zensync/base/types.hpp"

namespace zensync {

enum class SchemeId : std::uint8_t {
  kAuto = 0,  ///< choose among the others
  kBalanced = 1,
  kRecursiveDoubling = 2,
  kAgSparse = 3,
  kDenseRing = 4,  ///< our own dense coroutine, for C++ programs and tests
  kDense = 5,      ///< a dense all-reduce of the caller's; the engine only agrees on it
};

/// Fixed facts of a tensor; equal on all ranks.
struct TensorSpec {
  std::uint64_t rows = 0;
  std::uint64_t row_elems = 1;
  DType dtype = DType::kF32;
  Layout layout = Layout::kDense;
  std::uint64_t elems() const { return rows * row_elems; }
  std::uint64_t dense_bytes() const { return elems() * dtype_bytes(dtype); }
};

inline constexpr std::uint64_t kHistogramBins = 256;

/// What all ranks know of a tensor from its last sparse job; equal on all ranks.
struct KnownCounts {
  std::vector<std::uint64_t> units;  ///< per rank, non-zero units
  std::vector<std::uint64_t>
      elements;                   ///< per rank, non-zero elements (width 1: rows); 0: not counted
  std::uint64_t union_units = 0;  ///< units non-zero on at least one rank
  std::uint64_t width = 0;        ///< elements per unit in that job; 0: no counts yet
  /// Units of the union (about) in each of kHistogramBins equal ranges of the tensor; empty:
  /// unknown.
  std::vector<std::uint64_t> histogram;
  bool known() const { return width != 0; }
};

/// What was chosen for one tensor.
struct Plan {
  SchemeId scheme = SchemeId::kBalanced;
  std::uint64_t width = 1;  ///< elements per unit; divides row_elems
  /// Ends of the chunks, in slots, ascending; the last is the number of slots. `balanced` only.
  std::vector<std::uint64_t> chunk_ends;
};

}  // namespace zensync
