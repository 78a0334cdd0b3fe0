// Plain types that every module shares: ranks, element types, units, reductions.
// Place: base, level 0, beneath everything.
// Values and constexpr functions: no memory of their own, no state, no threads, nothing can fail.
// Numbers that travel (DType, ReduceOp, Layout) are part of the wire format: see
// docs/wire_format.md.
// Units of the names: `*_bytes` bytes, `*_elems` elements, `*_units` units (see docs/glossary.md).
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace zensync {

/// One worker of a group of n; 0 ≤ value < n. A type of its own so that a rank is never a count.
struct Rank {
  int value = -1;
  constexpr auto operator<=>(const Rank&) const = default;
};

/// Index of a unit in the whole tensor, 0 ≤ unit < U. 64 bits: tables of 2^33 rows exist.
using UnitId = std::uint64_t;

/// Element types that zensync sums.
enum class DType : std::uint8_t { kF32 = 0, kF64 = 1, kBF16 = 2, kF16 = 3, kI32 = 4, kI64 = 5 };
inline constexpr int kDTypeCount = 6;

constexpr bool is_valid(DType t) { return static_cast<int>(t) < kDTypeCount; }
constexpr bool is_float(DType t) { return t != DType::kI32 && t != DType::kI64; }
constexpr bool is_half(DType t) { return t == DType::kBF16 || t == DType::kF16; }

/// Bytes of one element.
constexpr std::size_t dtype_bytes(DType t) {
  if (is_half(t)) return 2;
  return t == DType::kF64 || t == DType::kI64 ? 8 : 4;
}

/// The type in which sums of `t` are kept: fp32 for 16-bit floats, else `t` itself.
constexpr DType sum_dtype(DType t) { return is_half(t) ? DType::kF32 : t; }

constexpr std::string_view dtype_name(DType t) {
  constexpr std::string_view kNames[] = {"float32", "float64", "bfloat16",
                                         "float16", "int32",   "int64"};
  return is_valid(t) ? kNames[static_cast<int>(t)] : "invalid";
}

/// SUM, or SUM divided once by n and rounded once (floats only).
enum class ReduceOp : std::uint8_t { kSum = 0, kAvg = 1 };

/// How the caller stores the tensor.
enum class Layout : std::uint8_t { kDense = 0, kCoo = 1 };

constexpr std::uint64_t div_ceil(std::uint64_t a, std::uint64_t b) { return a / b + (a % b != 0); }

}  // namespace zensync
