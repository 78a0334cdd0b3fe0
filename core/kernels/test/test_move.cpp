// Tests of kernels: moving units.
// gather and scatter: every table against ref, units of all small sizes and some large ones.
#include "data.hpp"

namespace zensync::kernels::test {
namespace {

std::vector<std::uint32_t> some_ascending(std::size_t units, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::uint32_t> at;
  for (std::uint32_t unit = 0; unit < units; ++unit) {
    if (random() % 3 == 0) at.push_back(unit);
  }
  return at;
}

TEST(Move, AllTablesAllSizes) {
  unsigned seed = 0;
  std::vector<std::size_t> sizes = {256, 1000, 4096, 10002};
  for (std::size_t bytes = 2; bytes <= 200; bytes += 2) sizes.push_back(bytes);
  for (std::size_t unit_bytes : sizes) {
    for (std::size_t units : {0, 1, 2, 40, 300}) {
      const auto at = some_ascending(units, ++seed);
      const auto base = make_elems(units * unit_bytes / 2, DType::kBF16, {0, 0, 0}, seed);
      Guarded expected(at.size() * unit_bytes);
      ref().gather(base.data(), at.data(), at.size(), unit_bytes, expected.data());
      const auto other = make_elems(at.size() * unit_bytes / 2, DType::kBF16, {0, 0, 0}, seed + 1);
      std::vector<std::byte> scattered = base;
      ref().scatter(scattered.data(), at.data(), at.size(), unit_bytes, other.data());
      for (const Table* table : available()) {
        Guarded out(at.size() * unit_bytes);
        table->gather(base.data(), at.data(), at.size(), unit_bytes, out.data());
        ASSERT_TRUE(out.is_intact()) << table->name << " " << unit_bytes;
        ASSERT_EQ(out.copy(), expected.copy()) << table->name << " " << unit_bytes;
        Guarded target(base.size());
        if (!base.empty()) std::memcpy(target.data(), base.data(), base.size());
        table->scatter(target.data(), at.data(), at.size(), unit_bytes, other.data());
        ASSERT_TRUE(target.is_intact()) << table->name << " " << unit_bytes;
        ASSERT_EQ(target.copy(), scattered) << table->name << " " << unit_bytes;
      }
    }
  }
}

TEST(Move, RefByHand) {
  const std::uint32_t base[] = {10, 11, 12, 13};
  const std::uint32_t at[] = {1, 3};
  std::uint32_t out[2];
  ref().gather(base, at, 2, 4, out);
  EXPECT_EQ(out[0], 11U);
  EXPECT_EQ(out[1], 13U);
  std::uint32_t target[4] = {};
  ref().scatter(target, at, 2, 4, out);
  EXPECT_EQ(target[0], 0U);
  EXPECT_EQ(target[1], 11U);
  EXPECT_EQ(target[3], 13U);
}

}  // namespace
}  // namespace zensync::kernels::test
