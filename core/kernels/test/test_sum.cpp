// add_units and finish: every table against ref bit for bit, ref against the processor's own
// arithmetic and against all 65,536 halves.
#include <bit>
#include <cmath>
#include <limits>

#include "data.hpp"
#include "ref/half.hpp"

namespace zensync::kernels::test {
namespace {

std::vector<std::byte> add(const Table& table, std::vector<std::byte> sums,
                           const std::vector<std::uint32_t>& at,
                           const std::vector<std::byte>& values, std::size_t width, DType t) {
  Guarded guarded(sums.size());
  if (!sums.empty()) std::memcpy(guarded.data(), sums.data(), sums.size());
  table.add_units(guarded.data(), at.data(), values.data(), at.size(), width, t);
  EXPECT_TRUE(guarded.is_intact()) << label(table, t, at.size(), width);
  return guarded.copy();
}

TEST(Add, AllTablesSameBits) {
  unsigned seed = 0;
  for (DType t : kAllDTypes) {
    for (std::size_t width : {1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 31, 32, 40, 64, 65, 100}) {
      for (std::size_t count : {0, 1, 3, 17, 70, 300}) {
        for (const Mix mix : {Mix{0.2, 0.1, 0.5}, Mix{0, 0, 0}}) {
          const std::size_t units = count / 3 + 1;  // positions come several times
          std::mt19937 random(++seed);
          std::vector<std::uint32_t> at(count);
          for (auto& place : at) place = static_cast<std::uint32_t>(random() % units);
          const auto values = make_elems(count * width, t, mix, seed);
          const auto sums = make_elems(units * width, sum_dtype(t), mix, seed + 1);
          const ScopedFlush flush;  // the kernels add denormals whatever the thread has set
          const auto expected = add(ref(), sums, at, values, width, t);
          for (const Table* table : available()) {
            ASSERT_EQ(add(*table, sums, at, values, width, t), expected)
                << label(*table, t, count, width);
          }
        }
      }
    }
  }
}

TEST(Add, InOrderAndExactUnderFlush) {
  const float values[] = {1e8F, 1.0F, -1e8F, 1e-42F};
  const std::uint32_t at[] = {0, 0, 0, 1};
  const ScopedFlush flush;
  for (const Table* table : available()) {
    float sums[2] = {0, 1e-42F};
    table->add_units(sums, at, values, 4, 1, DType::kF32);
    EXPECT_EQ(sums[0], 0.0F) << "(1e8 + 1) − 1e8 in fp32, in this order";
    EXPECT_EQ(std::bit_cast<std::uint32_t>(sums[1]), 2 * std::bit_cast<std::uint32_t>(1e-42F));
  }
#if defined(__x86_64__)
  volatile float least = 1e-42F;
  EXPECT_FALSE(least + least > 0.0F) << "negative control: FTZ and DAZ are still in force here";
#endif
}

TEST(Add, AccumulatorsNanWins) {
  const auto sum_nan = std::bit_cast<float>(0x7FC00001U);
  const auto value_nan = std::bit_cast<float>(0xFFC00002U);
  for (const Table* table : available()) {
    for (std::size_t width : {1, 21}) {
      std::vector<float> sums(width, sum_nan);
      const std::vector<float> values(width, value_nan);
      const std::uint32_t at = 0;
      table->add_units(sums.data(), &at, values.data(), 1, width, DType::kF32);
      for (float sum : sums) EXPECT_EQ(std::bit_cast<std::uint32_t>(sum), 0x7FC00001U);
    }
  }
}

std::vector<std::byte> finish(const Table& table, const std::vector<std::byte>& sums,
                              std::size_t elems, DType t, double divisor) {
  Guarded out(elems * dtype_bytes(t));
  table.finish(sums.data(), out.data(), elems, t, divisor);
  EXPECT_TRUE(out.is_intact()) << label(table, t, elems, 1);
  return out.copy();
}

TEST(Finish, AllTablesSameBits) {
  unsigned seed = 0;
  for (DType t : kAllDTypes) {
    for (std::size_t elems : {0, 1, 2, 7, 15, 16, 17, 33, 64, 100, 1001}) {
      for (double divisor : {1.0, 2.0, 3.0, 7.0, 16.0, 127.0}) {
        if (!is_float(t) && divisor != 1.0) continue;
        const auto sums = make_elems(elems, sum_dtype(t), {0.1, 0.1, 0.3}, ++seed);
        const ScopedFlush flush;
        const auto expected = finish(ref(), sums, elems, t, divisor);
        for (const Table* table : available()) {
          ASSERT_EQ(finish(*table, sums, elems, t, divisor), expected)
              << label(*table, t, elems, 1) << " / " << divisor;
          if (sum_dtype(t) != t) continue;
          std::vector<std::byte> in_place = sums;
          table->finish(in_place.data(), in_place.data(), elems, t, divisor);
          ASSERT_EQ(in_place, expected) << "in place, " << label(*table, t, elems, 1);
        }
      }
    }
  }
}

TEST(Finish, DividesAndRoundsOnce) {
  const float sums[] = {1.0F, 5.0F, 10.0F};
  for (const Table* table : available()) {
    float out[3];
    table->finish(sums, out, 3, DType::kF32, 3.0);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(out[i], sums[i] / 3.0F);
    EXPECT_NE(5.0F * (1.0F / 3.0F), 5.0F / 3.0F) << "negative control: a reciprocal differs";
  }
}

// Every half widens exactly, and rounding gives it back; NaNs become quiet.
TEST(Half, AllValues) {
  for (unsigned h = 0; h < 65536; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    const int exponent = static_cast<int>(half >> 10 & 31);
    const int mantissa = half & 0x3FF;
    const float f16 = ref::widen_f16(half);
    if (exponent == 31 && mantissa != 0) {
      EXPECT_TRUE(std::isnan(f16));
      EXPECT_EQ(ref::round_f16(f16), half | 0x200U);
    } else {
      double value =
          exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
      if (exponent == 31) value = std::numeric_limits<double>::infinity();
      EXPECT_EQ(static_cast<double>(f16), (half & 0x8000U) != 0 ? -value : value);
      EXPECT_EQ(ref::round_f16(f16), half);
    }
    const float bf16 = ref::widen_bf16(half);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(bf16), h << 16);
    EXPECT_EQ(ref::round_bf16(bf16), std::isnan(bf16) ? half | 0x40U : half);
  }
}

// Rounding against its definition: the nearer neighbour, at the middle the even one.
TEST(Half, RoundsToNearestEven) {
  for (unsigned h = 0; h < 0x7BFF; ++h) {
    const auto low = static_cast<std::uint16_t>(h);
    const float a = ref::widen_f16(low);
    const float b = ref::widen_f16(static_cast<std::uint16_t>(h + 1));
    const float middle = a + (b - a) / 2;
    EXPECT_EQ(ref::round_f16(middle), h + (h & 1U));
    EXPECT_EQ(ref::round_f16(std::nextafter(middle, 0.0F)), h);
    EXPECT_EQ(ref::round_f16(std::nextafter(middle, 1e9F)), h + 1);
  }
  EXPECT_EQ(ref::round_f16(65519.996F), 0x7BFF);
  EXPECT_EQ(ref::round_f16(65520.0F), 0x7C00);
  EXPECT_EQ(ref::round_bf16(std::bit_cast<float>(0x3F808000U)), 0x3F80);
  EXPECT_EQ(ref::round_bf16(std::bit_cast<float>(0x3F818000U)), 0x3F82);
  EXPECT_EQ(ref::round_bf16(std::bit_cast<float>(0x7F7FFFFFU)), 0x7F80);
}

// All halves through the tables: add to +0.0 widens, finish with divisor 1 rounds.
TEST(Half, TablesConvertAllValues) {
  std::vector<std::uint16_t> halves(65536);
  std::vector<std::uint32_t> at(65536);
  for (unsigned h = 0; h < 65536; ++h) {
    halves[h] = static_cast<std::uint16_t>(h);
    at[h] = h;
  }
  for (DType t : {DType::kBF16, DType::kF16}) {
    std::vector<float> expected(65536, 0.0F);
    ref().add_units(expected.data(), at.data(), halves.data(), 65536, 1, t);
    std::vector<std::uint16_t> rounded(65536);
    ref().finish(expected.data(), rounded.data(), 65536, t, 1.0);
    for (const Table* table : available()) {
      for (std::size_t width : {1, 64}) {
        std::vector<float> sums(65536, 0.0F);
        std::vector<std::uint16_t> out(65536);
        table->add_units(sums.data(), at.data(), halves.data(), 65536 / width, width, t);
        table->finish(sums.data(), out.data(), 65536, t, 1.0);
        EXPECT_EQ(std::memcmp(sums.data(), expected.data(), 4 * 65536), 0) << table->name;
        EXPECT_EQ(out, rounded) << table->name;
      }
    }
  }
}

}  // namespace
}  // namespace zensync::kernels::test
