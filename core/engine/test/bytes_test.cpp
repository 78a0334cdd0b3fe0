// How close the balanced scheme comes to what is stated: bytes against the index-free ideal,
// imbalance over owners. Place: tests of the engine. Bytes are those of `traffic()`, which equal
// the wire (traffic_test.cpp).
#include <gtest/gtest.h>

#include <algorithm>

#include "patterns.hpp"
#include "zensync/plan/plan.hpp"
#include "zensync/scheme/traffic.hpp"

namespace zensync::test {
namespace {

std::vector<std::vector<UnitId>> all_rows(Pattern pattern, std::uint64_t rows, int size,
                                          double density) {
  std::vector<std::vector<UnitId>> units;
  for (int rank = 0; rank < size; ++rank) {
    units.push_back(rows_of_rank({pattern, rows, size, density, 11}, rank));
  }
  return units;
}

std::uint64_t union_of(const std::vector<std::vector<UnitId>>& units) {
  std::vector<UnitId> united;
  for (const auto& own : units) united.insert(united.end(), own.begin(), own.end());
  std::sort(united.begin(), united.end());
  return static_cast<std::uint64_t>(std::unique(united.begin(), united.end()) - united.begin());
}

/// Wire bytes of the busiest rank over (n−1)/n · (1 + γ)·d·M, fp32, width 1, chunks as planned.
double over_ideal(const std::vector<std::vector<UnitId>>& units, std::uint64_t rows) {
  const auto n = static_cast<double>(units.size());
  TrafficInput input;
  input.size = static_cast<int>(units.size());
  input.spec = {rows, 1, DType::kF32, Layout::kDense};
  input.plan = make_plan(input.spec, input.size, TensorState(), {SchemeId::kBalanced});
  input.key = 1;
  const ExactCounts counts(units);
  input.counts = &counts;
  std::uint64_t most = 0;
  for (const RankTraffic& rank : traffic(input)) {
    most = std::max({most, rank.sent_bytes, rank.received_bytes});
  }
  double mean = 0;
  for (const auto& own : units) mean += static_cast<double>(own.size()) / n;
  const double ideal = (n - 1) / n * 4 * (mean + static_cast<double>(union_of(units)));
  return static_cast<double>(most) / ideal;
}

TEST(Bytes, PushAndPullAgainstTheIndexFreeIdeal) {
  constexpr std::uint64_t kRows = 4'000'000;
  const double at_1 = over_ideal(all_rows(Pattern::kFront, kRows, 8, 0.01), kRows);
  const double at_5 = over_ideal(all_rows(Pattern::kFront, kRows, 8, 0.05), kRows);
  EXPECT_LE(at_1, 1.18);
  EXPECT_LE(at_5, 1.10);
  EXPECT_GT(at_5, 1.0) << "control: less than the ideal cannot be";
}

/// Units that an owner receives from all ranks, max / mean over owners.
double imbalance(const std::vector<std::vector<UnitId>>& units, std::uint64_t rows,
                 PartitionKind kind) {
  const Partition partition(kind, rows, static_cast<int>(units.size()), 1);
  std::vector<double> received(units.size());
  double total = 0;
  for (const auto& own : units) {
    for (UnitId unit : own) {
      received[static_cast<std::size_t>(partition.owner_of(unit).value)] += 1;
      total += 1;
    }
  }
  return *std::max_element(received.begin(), received.end()) / total *
         static_cast<double>(units.size());
}

TEST(Bytes, OwnersReceiveAlike) {
  constexpr std::uint64_t kRows = 400'000;
  for (int size : {8, 16}) {
    for (Pattern pattern : {Pattern::kUniform, Pattern::kFront, Pattern::kZipf, Pattern::kClustered,
                            Pattern::kStrided}) {
      const auto units = all_rows(pattern, kRows, size, 0.05);
      ASSERT_GE(units[0].size(), 10000U) << pattern_name(pattern);
      EXPECT_LE(imbalance(units, kRows, PartitionKind::kRotation), 1.05)
          << pattern_name(pattern) << " n=" << size;
    }
    const auto front = all_rows(Pattern::kFront, kRows, size, 0.05);
    EXPECT_GT(imbalance(front, kRows, PartitionKind::kRange), 2) << "control: ranges are uneven";
  }
}

}  // namespace
}  // namespace zensync::test
