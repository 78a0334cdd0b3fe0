// Tests of kernels: finding units.
// find_units and count_nonzero: every table against ref, and ref against values worked out by hand.
#include "data.hpp"

namespace zensync::kernels::test {
namespace {

struct Found {
  std::vector<std::uint32_t> units;
  std::vector<std::byte> data;
};

Found find(const Table& table, const std::vector<std::byte>& input, std::size_t units,
           std::size_t width, DType t, std::size_t offset_elems = 0) {
  // `offset_elems`: data need not be aligned to more than its elements.
  const std::size_t shift = offset_elems * dtype_bytes(t);
  Guarded data(input.size() + shift);
  if (!input.empty()) std::memcpy(data.data() + shift, input.data(), input.size());
  Guarded out((units + kSlackElems) * sizeof(std::uint32_t));
  const std::size_t found =
      table.find_units(data.data() + shift, units, width, t, out.as<std::uint32_t>());
  EXPECT_TRUE(data.is_intact() && out.is_intact()) << label(table, t, units, width);
  const auto copy = data.copy();
  return {{out.as<std::uint32_t>(), out.as<std::uint32_t>() + found},
          {copy.begin() + static_cast<std::ptrdiff_t>(shift), copy.end()}};
}

TEST(Find, RefByHand) {
  std::vector<std::byte> data(6 * 4);
  put(data, 1, DType::kF32, 0x80000000U);
  put(data, 2, DType::kF32, 1);
  put(data, 5, DType::kF32, 0x80000001U);
  const Found singles = find(ref(), data, 6, 1, DType::kF32);
  EXPECT_EQ(singles.units, (std::vector<std::uint32_t>{2, 5}));
  std::vector<std::byte> cleared = data;
  put(cleared, 1, DType::kF32, 0);
  EXPECT_EQ(singles.data, cleared);
  EXPECT_EQ(find(ref(), data, 3, 2, DType::kF32).units, (std::vector<std::uint32_t>{1, 2}));
  EXPECT_EQ(find(ref(), data, 6, 1, DType::kI32).units, (std::vector<std::uint32_t>{1, 2, 5}));
  EXPECT_EQ(find(ref(), data, 6, 1, DType::kI32).data, data);  // an integer has no −0
  EXPECT_EQ(ref().count_nonzero(data.data(), 6, DType::kF32), 2U);
  EXPECT_EQ(ref().count_nonzero(data.data(), 6, DType::kI32), 3U);
}

void compare(const std::vector<std::byte>& input, std::size_t units, std::size_t width, DType t) {
  const Found expected = find(ref(), input, units, width, t);
  const std::uint64_t nonzero = ref().count_nonzero(input.data(), units * width, t);
  for (const Table* table : available()) {
    const Found got = find(*table, input, units, width, t, units % 3);
    ASSERT_EQ(got.units, expected.units) << label(*table, t, units, width);
    ASSERT_EQ(got.data, expected.data) << label(*table, t, units, width);
    ASSERT_EQ(table->count_nonzero(input.data(), units * width, t), nonzero);
  }
}

TEST(Find, AllTablesAllShapes) {
  const ScopedFlush flush;  // the test is on integers: DAZ has no say
  unsigned seed = 0;
  const Mix mixes[] = {{1, 0, 0},         {0, 1, 0},       {0, 0, 0},      {0.9, 0, 0.1},
                       {0.45, 0.45, 0.1}, {0, 0.97, 0.03}, {0.99, 0.01, 0}};
  for (DType t : kAllDTypes) {
    for (std::size_t width :
         {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 130}) {
      for (std::size_t units : {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130, 257}) {
        const Mix mix = mixes[seed % 7];
        compare(make_elems(units * width, t, mix, ++seed), units, width, t);
      }
    }
  }
}

TEST(Find, LargeShapes) {
  unsigned seed = 1000;
  for (DType t : kAllDTypes) {
    for (std::size_t width : {1, 3, 6, 8, 64, 2500, 9001}) {
      for (const Mix mix : {Mix{0.999, 0, 0.0005}, Mix{0.5, 0.49, 0.01}, Mix{0.2, 0.4, 0.1}}) {
        const std::size_t units = 40000 / width + 5;
        compare(make_elems(units * width, t, mix, ++seed), units, width, t);
      }
    }
  }
}

// Each single element of a unit counts, and each −0.0 is replaced, wherever it stands.
TEST(Find, EveryPlace) {
  for (DType t : kAllDTypes) {
    for (std::size_t width : {1, 2, 5, 8, 16, 24, 40, 67}) {
      const std::size_t units = 5;
      for (std::size_t i = 0; i < units * width; ++i) {
        std::vector<std::byte> data(units * width * dtype_bytes(t));
        put(data, i, t, i % 2 == 0 ? 1 : sign_bit(t));
        compare(data, units, width, t);
      }
    }
  }
}

// Denormals count with DAZ set; a comparison of floats would miss them (the reason for integer
// tests).
TEST(Find, DenormalsUnderDaz) {
  const std::vector<float> denormals(100, 1e-42F);
  std::vector<std::byte> data(400);
  std::memcpy(data.data(), denormals.data(), 400);
  const ScopedFlush flush;
#if defined(__x86_64__)
  volatile float one = denormals[0];
  EXPECT_FALSE(one != 0.0F) << "negative control: DAZ is in force";
#endif
  for (const Table* table : available()) {
    EXPECT_EQ(find(*table, data, 100, 1, DType::kF32).units.size(), 100U) << table->name;
    EXPECT_EQ(table->count_nonzero(data.data(), 100, DType::kF32), 100U) << table->name;
  }
}

// The guards see a write past the end.
TEST(Find, GuardsTrip) {
  Guarded guarded(10);
  guarded.data()[10] = std::byte{0};
  EXPECT_FALSE(guarded.is_intact());
}

}  // namespace
}  // namespace zensync::kernels::test
