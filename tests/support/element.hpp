// One element as bits: the obvious conversions between numbers and every dtype. Place:
// tests/support. An oracle that shares nothing with the kernels: rounding is done with frexp and
// nearbyint on doubles. Pure; expects the default rounding mode and no DAZ/FTZ in the calling
// thread.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "zensync/base/types.hpp"

namespace zensync::test {

inline constexpr DType kAllDTypes[] = {DType::kF32, DType::kF64, DType::kBF16,
                                       DType::kF16, DType::kI32, DType::kI64};

/// The value nearest to `value` (ties to even) with `digits` significant bits, exponents ≥ `least`.
inline double round_to(double value, int digits, int least, double largest) {
  if (value == 0 || !std::isfinite(value)) return value;
  int exponent = 0;
  std::frexp(value, &exponent);
  const int ulp = std::max(exponent - digits, least - digits + 1);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -ulp)), ulp);
  if (std::fabs(rounded) <= largest) return rounded;
  return std::copysign(std::numeric_limits<double>::infinity(), value);
}

inline std::uint64_t bits_of_float(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline std::uint64_t half_bits(double value) {
  const std::uint64_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7E00;
  const double magnitude = std::fabs(round_to(value, 11, -14, 65504));
  if (std::isinf(magnitude)) return sign | 0x7C00;
  if (magnitude < std::ldexp(1.0, -14)) {
    return sign | static_cast<std::uint64_t>(std::ldexp(magnitude, 24));
  }
  int exponent = 0;
  const double fraction = std::frexp(magnitude, &exponent);  // [0.5, 1)
  const auto mantissa = static_cast<std::uint64_t>(std::ldexp(fraction, 11)) - 1024;
  return sign | (static_cast<std::uint64_t>(exponent + 14) << 10) | mantissa;
}

inline std::uint64_t bfloat_bits(double value) {
  const double largest = std::ldexp(255.0, 120);
  const double rounded = std::isnan(value) ? value : round_to(value, 8, -126, largest);
  return bits_of_float(static_cast<float>(rounded)) >> 16;
}

/// `value` in dtype `t`, rounded once, to nearest, ties to even. Integers: `value` is whole.
inline std::uint64_t bits_of(double value, DType t) {
  std::uint64_t bits = 0;
  switch (t) {
    case DType::kF32:
      return bits_of_float(static_cast<float>(value));
    case DType::kF64:
      std::memcpy(&bits, &value, 8);
      return bits;
    case DType::kBF16:
      return bfloat_bits(value);
    case DType::kF16:
      return half_bits(value);
    case DType::kI32:
      return static_cast<std::uint32_t>(static_cast<std::int64_t>(value));
    case DType::kI64:
      return static_cast<std::uint64_t>(static_cast<std::int64_t>(value));
  }
  return 0;
}

inline double half_value(std::uint64_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = static_cast<int>((bits >> 10) & 31);
  const auto mantissa = static_cast<double>(bits & 1023);
  if (exponent == 31) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

/// The number that `bits` stand for; exact for all floats (int64: up to 2^53).
inline double value_of(std::uint64_t bits, DType t) {
  double wide = 0;
  float narrow = 0;
  const auto word = static_cast<std::uint32_t>(t == DType::kBF16 ? bits << 16 : bits & 0xFFFFFFFFU);
  switch (t) {
    case DType::kF64:
      std::memcpy(&wide, &bits, 8);
      return wide;
    case DType::kF16:
      return half_value(bits);
    case DType::kI32:
      return static_cast<std::int32_t>(word);
    case DType::kI64:
      return static_cast<double>(static_cast<std::int64_t>(bits));
    default:
      std::memcpy(&narrow, &word, 4);
      return narrow;
  }
}

inline std::uint64_t load(std::span<const std::byte> from, std::size_t i, DType t) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, from.data() + i * dtype_bytes(t), dtype_bytes(t));
  return bits;
}

inline void store(std::span<std::byte> to, std::size_t i, DType t, std::uint64_t bits) {
  std::memcpy(to.data() + i * dtype_bytes(t), &bits, dtype_bytes(t));
}

inline std::uint64_t sign_bit(DType t) { return 1ULL << (dtype_bytes(t) * 8 - 1); }

/// Non-zero as the glossary says: a bit set besides the sign (integers: any bit).
inline bool is_nonzero(std::uint64_t bits, DType t) {
  return (is_float(t) ? bits & ~sign_bit(t) : bits) != 0;
}

/// The sum of `terms` (bits of `t`) in their order, from +0.0, in sum_dtype(t), divided by
/// `divisor` and rounded once.
inline std::uint64_t ordered_sum(std::span<const std::uint64_t> terms, DType t, double divisor) {
  if (!is_float(t)) {
    std::uint64_t sum = 0;
    for (std::uint64_t term : terms) sum += term;
    return t == DType::kI32 ? sum & 0xFFFFFFFFU : sum;
  }
  if (t == DType::kF64) {
    double sum = 0.0;
    for (std::uint64_t term : terms) sum = sum + value_of(term, t);
    return bits_of(sum / divisor, t);
  }
  float sum = 0.0F;
  for (std::uint64_t term : terms) sum = sum + static_cast<float>(value_of(term, t));
  return bits_of(static_cast<double>(sum) / divisor, t);  // float ÷ small: 53 bits suffice
}

}  // namespace zensync::test
