// 16-bit floats to fp32 and back, one value at a time, in integers: the rounding mode, DAZ and FTZ
// of the calling thread have no say. Place: kernels, private (and its tests). Exact one way; the
// other way rounds to nearest, ties to even. A NaN stays one: quiet, with the top bits of its
// payload. bf16 to fp32 leaves a signalling NaN as it is (a shift); fp16 to fp32 makes it quiet, as
// processors do. Pure functions; nothing can fail.
#pragma once

#include <bit>
#include <cstdint>

namespace zensync::kernels::ref {

inline float widen_bf16(std::uint16_t half) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
}

inline std::uint16_t round_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  const std::uint32_t kept_is_odd = (bits >> 16) & 1U;
  return static_cast<std::uint16_t>((bits + 0x7FFFU + kept_is_odd) >> 16);
}

inline float widen_f16(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t exponent = (half >> 10) & 31U;
  std::uint32_t mantissa = half & 0x3FFU;
  if (exponent == 31) {
    const std::uint32_t quiet = mantissa == 0 ? 0 : 0x400000U;
    return std::bit_cast<float>(sign | 0x7F800000U | quiet | (mantissa << 13));
  }
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  }
  if (mantissa == 0) return std::bit_cast<float>(sign);
  // mantissa × 2^−24: shift the leading one to bit 10, one less in the exponent for each place.
  std::uint32_t places = 0;
  while ((mantissa & 0x400U) == 0) {
    mantissa <<= 1;
    ++places;
  }
  return std::bit_cast<float>(sign | ((113 - places) << 23) | ((mantissa & 0x3FFU) << 13));
}

/// bits / 2^shift, rounded to nearest, ties to even; 1 ≤ shift ≤ 31.
inline std::uint32_t shift_round(std::uint32_t bits, unsigned shift) {
  const std::uint32_t kept = bits >> shift;
  const std::uint32_t rest = bits & ((1U << shift) - 1);
  const std::uint32_t half = 1U << (shift - 1);
  return kept + (rest > half || (rest == half && (kept & 1U) != 0) ? 1 : 0);
}

inline std::uint16_t round_f16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t size = bits & 0x7FFFFFFFU;
  std::uint32_t half = 0;
  if (size > 0x7F800000U) {
    half = 0x7E00U | ((size >> 13) & 0x3FFU);
  } else if (size >= 0x47800000U) {  // 2^16 and more, infinity too
    half = 0x7C00U;
  } else if (size >= 0x38800000U) {  // normal in fp16; a carry may run up to infinity
    half = shift_round(size - (112U << 23), 13);
  } else if (size >= 0x33000000U) {  // 2^−25 and more: denormal in fp16, units of 2^−24
    const unsigned exponent = size >> 23;
    half = shift_round((size & 0x7FFFFFU) | 0x800000U, 126 - exponent);
  }
  return static_cast<std::uint16_t>(sign | half);
}

}  // namespace zensync::kernels::ref
