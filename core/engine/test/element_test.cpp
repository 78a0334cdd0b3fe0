// The tests' own conversions against facts that are known from elsewhere, and against each other.
// Place: tests of the engine (it uses tests/support most). A wrong oracle would make every check
// worthless.
#include "element.hpp"

#include <gtest/gtest.h>

namespace zensync::test {
namespace {

TEST(Element, KnownBits) {
  EXPECT_EQ(bits_of(1.0, DType::kF16), 0x3C00U);
  EXPECT_EQ(bits_of(65504, DType::kF16), 0x7BFFU);
  EXPECT_EQ(bits_of(65520, DType::kF16), 0x7C00U);  // a tie, to even: infinity
  EXPECT_EQ(bits_of(65519.9, DType::kF16), 0x7BFFU);
  EXPECT_EQ(bits_of(0x1p-24, DType::kF16), 0x0001U);
  EXPECT_EQ(bits_of(0x1p-25, DType::kF16), 0x0000U);  // a tie, to even
  EXPECT_EQ(bits_of(-0.0, DType::kF16), 0x8000U);
  EXPECT_EQ(bits_of(1.0, DType::kBF16), 0x3F80U);
  EXPECT_EQ(bits_of(1.0 + 0x1p-8, DType::kBF16), 0x3F80U);  // a tie, to even
  EXPECT_EQ(bits_of(1.0 + 3 * 0x1p-8, DType::kBF16), 0x3F82U);
  EXPECT_EQ(bits_of(3.4e38, DType::kBF16), 0x7F80U);
  EXPECT_EQ(bits_of(-1, DType::kI32), 0xFFFFFFFFU);
}

TEST(Element, HalvesSurviveTheRoundTrip) {
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    for (std::uint64_t bits = 0; bits < 0x10000; ++bits) {
      const double value = value_of(bits, dtype);
      if (std::isnan(value)) continue;
      ASSERT_EQ(bits_of(value, dtype), bits);
    }
  }
}

TEST(Element, SumsWrapAndRoundOnce) {
  const std::uint64_t integers[] = {0xFFFFFFFFU, 2};
  EXPECT_EQ(ordered_sum(integers, DType::kI32, 1), 1U);
  const std::uint64_t ones[] = {bits_of(256, DType::kBF16), bits_of(1, DType::kBF16),
                                bits_of(1, DType::kBF16)};
  EXPECT_EQ(ordered_sum(ones, DType::kBF16, 1), bits_of(258, DType::kBF16));
  const std::uint64_t minus_zero[] = {bits_of(-0.0, DType::kF32)};
  EXPECT_EQ(ordered_sum(minus_zero, DType::kF32, 1), 0U);
}

}  // namespace
}  // namespace zensync::test
