// Tests of kernels: coalesce against the obvious sum.
// coalesce: every table against a map that adds in the order stored; rows up to 2^63 − 1.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "data.hpp"

namespace zensync::kernels::test {
namespace {

struct Coalesced {
  bool had_duplicates = false;
  std::vector<std::uint64_t> rows;
  std::vector<std::byte> sums;
};

Coalesced run(const Table& table, const std::vector<std::int64_t>& indices,
              const std::vector<std::byte>& values, std::size_t row_elems, DType t,
              CoalesceScratch& scratch) {
  Array<std::uint64_t> rows;
  Buffer sums;
  Coalesced result;
  result.had_duplicates =
      coalesce(table, {indices, values.data(), row_elems, t}, scratch, rows, sums);
  result.rows.assign(rows.data(), rows.data() + rows.size());
  result.sums.assign(sums.data(), sums.data() + sums.size());
  return result;
}

Coalesced by_map(const std::vector<std::int64_t>& indices, const std::vector<std::byte>& values,
                 std::size_t row_elems, DType t) {
  const std::size_t sum_bytes = row_elems * dtype_bytes(sum_dtype(t));
  std::map<std::uint64_t, std::vector<std::byte>> sums;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    auto& sum = sums[static_cast<std::uint64_t>(indices[i])];
    sum.resize(sum_bytes);
    const std::uint32_t at = 0;
    const std::byte* value = values.data() + i * row_elems * dtype_bytes(t);
    ref().add_units(sum.data(), &at, value, 1, row_elems, t);
  }
  Coalesced result;
  result.had_duplicates = sums.size() != indices.size();
  for (const auto& [row, sum] : sums) {
    result.rows.push_back(row);
    result.sums.insert(result.sums.end(), sum.begin(), sum.end());
  }
  return result;
}

void compare(const std::vector<std::int64_t>& indices, std::size_t row_elems, DType t,
             CoalesceScratch& scratch) {
  const auto values =
      make_elems(indices.size() * row_elems, t, {0.1, 0.1, 0.1}, static_cast<unsigned>(row_elems));
  const Coalesced expected = by_map(indices, values, row_elems, t);
  for (const Table* table : available()) {
    const Coalesced got = run(*table, indices, values, row_elems, t, scratch);
    EXPECT_EQ(got.had_duplicates, expected.had_duplicates) << table->name;
    ASSERT_EQ(got.rows, expected.rows) << table->name << " of " << indices.size();
    ASSERT_EQ(got.sums, expected.sums) << table->name << " of " << indices.size();
  }
}

TEST(Coalesce, ManyShapes) {
  CoalesceScratch scratch;
  std::mt19937_64 random(3);
  for (DType t : kAllDTypes) {
    for (std::int64_t rows :
         {std::int64_t{1}, std::int64_t{5}, std::int64_t{300}, std::int64_t{151936},
          std::int64_t{1} << 32, std::int64_t{1} << 40, std::numeric_limits<std::int64_t>::max()}) {
      for (std::size_t entries : {0, 1, 2, 50, 1023, 3000}) {
        std::vector<std::int64_t> indices(entries);
        for (auto& row : indices) row = static_cast<std::int64_t>(random() >> 1) % rows;
        for (std::size_t i = 0; i + 7 < entries; i += 7) indices[i + 5] = indices[i];
        compare(indices, entries % 2 == 0 ? 1 : 9, t, scratch);
        std::sort(indices.begin(), indices.end());
        compare(indices, 3, t, scratch);
      }
    }
  }
}

TEST(Coalesce, EdgesOfRows) {
  CoalesceScratch scratch;
  const std::int64_t last = std::numeric_limits<std::int64_t>::max();
  compare({last, 0, last, 1, 0}, 4, DType::kF32, scratch);
  compare({5, 5, 5, 4}, 4, DType::kBF16, scratch);
  compare({1, 2, 3}, 4, DType::kF32, scratch);
  compare({(std::int64_t{1} << 32) - 1, 0}, 2, DType::kI64, scratch);
  compare({std::int64_t{1} << 32, 0}, 2, DType::kI64, scratch);
}

// Sums start from +0.0, so a lone −0.0 comes out as +0.0; and order matters, which a map of another
// order would show (negative control).
TEST(Coalesce, OrderStored) {
  CoalesceScratch scratch;
  const std::vector<float> values = {1e8F, -0.0F, 1.0F, -1e8F};
  std::vector<std::byte> bytes(16);
  std::memcpy(bytes.data(), values.data(), 16);
  for (const Table* table : available()) {
    const Coalesced got = run(*table, {9, 2, 9, 9}, bytes, 1, DType::kF32, scratch);
    float sums[2];
    std::memcpy(sums, got.sums.data(), 8);
    EXPECT_FALSE(std::signbit(sums[0]));
    EXPECT_EQ(sums[1], (1e8F + 1.0F) - 1e8F);
    EXPECT_NE(sums[1], (1e8F - 1e8F) + 1.0F);
  }
}

TEST(Coalesce, WarmScratchDoesNotGrow) {
  CoalesceScratch scratch;
  const std::vector<std::int64_t> indices = {3, 1, 2, 1};
  compare(indices, 2, DType::kF32, scratch);
  const std::byte* keys = scratch.keys.data();
  const std::byte* order = scratch.order.data();
  compare(indices, 2, DType::kF32, scratch);
  EXPECT_EQ(scratch.keys.data(), keys);
  EXPECT_EQ(scratch.order.data(), order);
}

}  // namespace
}  // namespace zensync::kernels::test
