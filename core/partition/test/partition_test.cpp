// The bijection, exhaustively for small sizes, and the splitter against it. Place: tests of
// partition. Oracle: owner_of/slot_of/unit_at checked against each other and against the definition
// in the header.
#include "zensync/partition/partition.hpp"

#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "zensync/kernels/kernels.hpp"

namespace zensync {
namespace {

constexpr PartitionKind kKinds[] = {PartitionKind::kRotation, PartitionKind::kRange,
                                    PartitionKind::kCyclic};

void check_bijection(const Partition& partition) {
  std::set<std::pair<int, std::uint64_t>> seen;
  for (UnitId unit = 0; unit < partition.units(); ++unit) {
    const Rank owner = partition.owner_of(unit);
    const std::uint64_t slot = partition.slot_of(unit);
    ASSERT_GE(owner.value, 0);
    ASSERT_LT(owner.value, partition.owners());
    ASSERT_LT(slot, partition.slots());
    ASSERT_EQ(partition.unit_at(owner, slot), unit);
    ASSERT_TRUE(seen.insert({owner.value, slot}).second) << "two units at one place";
  }
}

TEST(Partition, IsABijectionForAllSmallSizes) {
  for (PartitionKind kind : kKinds) {
    for (int owners = 1; owners <= 17; ++owners) {
      for (std::uint64_t units = 1; units <= 200; ++units) {
        for (std::uint64_t key : {1ULL, 77ULL}) {
          ASSERT_NO_FATAL_FAILURE(check_bijection({kind, units, owners, key}))
              << units << " units, " << owners << " owners";
        }
      }
    }
  }
}

TEST(Partition, SlotsWithoutAUnitExistOnlyInTheLastGroup) {
  const Partition partition(PartitionKind::kRotation, 13, 4, 9);
  for (int owner = 0; owner < 4; ++owner) {
    for (std::uint64_t slot = 0; slot + 1 < partition.slots(); ++slot) {
      EXPECT_LT(partition.unit_at(Rank{owner}, slot), 13U);
    }
  }
}

TEST(Partition, AnotherKeyRotatesOtherwise) {
  const Partition a(PartitionKind::kRotation, 8000, 8, 1);
  const Partition b(PartitionKind::kRotation, 8000, 8, 2);
  int same = 0;
  for (UnitId unit = 0; unit < 8000; unit += 8) same += a.owner_of(unit) == b.owner_of(unit);
  EXPECT_LT(same, 250);  // 125 expected of 1000
  EXPECT_GT(same, 40);
}

TEST(Splitter, ListsEachUnitAtItsOwnerInOrder) {
  for (PartitionKind kind : kKinds) {
    for (int owners : {1, 2, 3, 7, 8, 16, 255}) {
      const std::uint64_t units = 100003;
      const Partition partition(kind, units, owners, 5);
      Splitter splitter(owners);
      const std::uint64_t slot_lo = partition.slots() > 64 ? 64 : 0;
      const std::uint64_t slot_hi =
          std::min<std::uint64_t>(partition.slots(), slot_lo + kernels::kBlockSlots);
      splitter.begin_block(partition, slot_lo);
      std::size_t expected = 0;
      for (int run = 0; run < partition.runs(); ++run) {
        std::vector<std::uint32_t> rel;
        const UnitId begin = partition.run_begin(run, slot_lo);
        for (UnitId unit = begin; unit < partition.run_end(run, slot_hi); unit += 3) {
          rel.push_back(static_cast<std::uint32_t>(unit - begin));
        }
        expected += rel.size();
        splitter.add(run, rel.data(), rel.size());
      }
      std::size_t listed = 0;
      for (int owner = 0; owner < owners; ++owner) {
        const Rank rank{owner};
        std::vector<std::uint32_t> at(splitter.count(owner));
        partition.units_of(rank, slot_lo, splitter.offsets(owner), at.size(), at.data());
        listed += at.size();
        for (std::size_t i = 0; i < at.size(); ++i) {
          ASSERT_EQ(at[i], splitter.at(owner)[i]);
          const UnitId unit = partition.run_begin(partition.run_of(rank), slot_lo) + at[i];
          ASSERT_EQ(partition.owner_of(unit), rank);
          ASSERT_EQ(partition.slot_of(unit), slot_lo + splitter.offsets(owner)[i]);
        }
      }
      ASSERT_EQ(listed, expected);
    }
  }
}

TEST(Splitter, PackedUnitsAreRememberedByTheirOrder) {
  const Partition partition(PartitionKind::kRotation, 64, 4, 5);
  Splitter splitter(4);
  splitter.begin_block(partition, 0);
  const std::uint32_t rel[] = {1, 5, 6, 40};
  splitter.add_packed(0, rel, 4, 100);
  std::set<std::uint32_t> seen;
  for (int owner = 0; owner < 4; ++owner) {
    for (std::size_t i = 0; i < splitter.count(owner); ++i) seen.insert(splitter.at(owner)[i]);
  }
  EXPECT_EQ(seen, (std::set<std::uint32_t>{100, 101, 102, 103}));
}

}  // namespace
}  // namespace zensync
