// Inputs for the kernels' tests: random elements of every dtype with edge values among them,
// guarded arrays, DAZ and FTZ for a scope. Place: kernels/test. Everything is made from a seed.
// Values are bit patterns, so that −0.0, denormals, infinities and NaNs of every kind can be named.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "zensync/kernels/kernels.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zensync::kernels::test {

inline constexpr DType kAllDTypes[] = {DType::kF32, DType::kF64, DType::kBF16,
                                       DType::kF16, DType::kI32, DType::kI64};

inline std::uint64_t sign_bit(DType t) { return std::uint64_t{1} << (dtype_bytes(t) * 8 - 1); }

inline unsigned mantissa_bits(DType t) {
  switch (t) {
    case DType::kF32:
      return 23;
    case DType::kF64:
      return 52;
    case DType::kBF16:
      return 7;
    default:
      return 10;
  }
}

/// Bits of edge values: ±0, least and largest denormal, ±Inf, quiet and signalling NaN; of integers
/// the least and the largest.
inline std::vector<std::uint64_t> edge_values(DType t) {
  const std::uint64_t sign = sign_bit(t);
  const std::uint64_t all = sign | (sign - 1);
  if (!is_float(t)) return {0, 1, sign, sign - 1, all};
  const std::uint64_t one = std::uint64_t{1} << mantissa_bits(t);
  const std::uint64_t infinity = (sign - 1) & ~(one - 1);
  std::vector<std::uint64_t> values = {0,
                                       1,
                                       one - 1,
                                       one,
                                       infinity,
                                       infinity - 1,
                                       infinity | (one >> 1),
                                       infinity | 1,
                                       infinity | (one - 1),
                                       infinity | (one >> 2)};
  const std::size_t count = values.size();
  for (std::size_t i = 0; i < count; ++i) values.push_back(values[i] | sign);
  return values;
}

/// What share of elements is +0, −0, or an edge value; the rest has random bits.
struct Mix {
  double zero = 0.9;
  double negative_zero = 0;
  double edge = 0;
};

inline void put(std::vector<std::byte>& to, std::size_t i, DType t, std::uint64_t bits) {
  std::memcpy(to.data() + i * dtype_bytes(t), &bits, dtype_bytes(t));
}

/// `finite`: small ordinary numbers where bits would be random.
inline std::vector<std::byte> make_elems(std::size_t elems, DType t, Mix mix, unsigned seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform(0, 1);
  const std::vector<std::uint64_t> edges = edge_values(t);
  std::vector<std::byte> result(elems * dtype_bytes(t));
  for (std::size_t i = 0; i < elems; ++i) {
    const double u = uniform(random);
    std::uint64_t bits = random();
    if (u < mix.zero) {
      bits = 0;
    } else if (u < mix.zero + mix.negative_zero) {
      bits = is_float(t) ? sign_bit(t) : 0;
    } else if (u < mix.zero + mix.negative_zero + mix.edge) {
      bits = edges[random() % edges.size()];
    }
    put(result, i, t, bits);
  }
  return result;
}

/// An array whose ends are watched: `check` fails if bytes outside it were written.
class Guarded {
 public:
  explicit Guarded(std::size_t size_bytes) : size_(size_bytes), bytes_(size_bytes + 2 * kGuard) {
    std::memset(bytes_.data(), kMark, bytes_.size());
  }
  std::byte* data() { return bytes_.data() + kGuard; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }
  bool is_intact() const {
    for (std::size_t i = 0; i < kGuard; ++i) {
      if (bytes_[i] != std::byte{kMark}) return false;
      if (bytes_[kGuard + size_ + i] != std::byte{kMark}) return false;
    }
    return true;
  }
  std::vector<std::byte> copy() const {
    return {bytes_.begin() + kGuard, bytes_.begin() + kGuard + static_cast<std::ptrdiff_t>(size_)};
  }

 private:
  static constexpr std::size_t kGuard = 128;
  static constexpr unsigned char kMark = 0xA5;
  std::size_t size_;
  std::vector<std::byte> bytes_;
};

/// Sets DAZ and FTZ in this thread, as torch.set_flush_denormal does.
class ScopedFlush {
 public:
#if defined(__x86_64__)
  ScopedFlush() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040U); }
  ~ScopedFlush() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  ScopedFlush() {}
  ~ScopedFlush() {}
#endif
};

inline std::string label(const Table& table, DType t, std::size_t elems, std::size_t width) {
  return std::string(table.name) + " " + std::string(dtype_name(t)) + " units " +
         std::to_string(elems) + " width " + std::to_string(width);
}

inline const Table& ref() { return *available().back(); }

}  // namespace zensync::kernels::test
