// Views over memory that the caller owns: pointer, shape, dtype.
// Place: base, level 0; what a job is submitted with (engine, level 5).
// They hold nothing and free nothing: the caller keeps the memory alive, and does not touch it,
// until the job has ended. They are copied freely; no threads, nothing here can fail or is checked
// (the engine checks a job's views before anything is sent).
// A tensor is rows × row_elems elements; an element-sparse one has row_elems = 1.
#pragma once

#include <cstdint>

#include "zensync/base/types.hpp"

namespace zensync {

/// A dense-stored tensor, contiguous, row-major: rows × row_elems elements of `dtype`.
/// `ids`, if not null: ascending, distinct rows (int64, `ids_count` of them) outside which every
/// element is known to be zero with its sign clear (+0.0), so that no scan is needed; a -0.0 there
/// stays as it is.
struct DenseView {
  void* data = nullptr;
  std::uint64_t rows = 0;
  std::uint64_t row_elems = 1;
  DType dtype = DType::kF32;
  const std::int64_t* ids = nullptr;
  std::uint64_t ids_count = 0;
};

/// A COO tensor of `rows` × row_elems elements, of which `entries` rows are stored:
/// `indices` int64[entries], `values` dtype[entries × row_elems], both contiguous.
/// Indices may have any order; duplicates add up.
struct CooView {
  const std::int64_t* indices = nullptr;
  const void* values = nullptr;
  std::uint64_t entries = 0;
  std::uint64_t rows = 0;
  std::uint64_t row_elems = 1;
  DType dtype = DType::kF32;
};

}  // namespace zensync
