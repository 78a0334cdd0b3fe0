// `traffic()` from exact counts against what passes the counting driver, byte for byte, sent and
// received of every rank, for every scheme, pattern, n and codec policy. Place: tests of the
// engine. The plan is the one that the engine reports; units are found in the inputs by a plain
// loop.
#include "zensync/scheme/traffic.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "group.hpp"
#include "zensync/base/hash.hpp"

namespace zensync::test {
namespace {

/// Units of `width` elements that rank `rank` sends: scanned ones by value, listed ones by row.
std::vector<UnitId> units_of(const Case& job, std::size_t rank, std::uint64_t width) {
  const RankData& data = job.ranks[rank];
  const std::uint64_t parts = job.spec.row_elems / width;
  std::vector<UnitId> units;
  for (std::size_t i = 0; i < data.rows.size(); ++i) {
    for (std::uint64_t part = 0; part < parts; ++part) {
      bool is_sent = job.spec.storage != Storage::kDense;
      for (std::uint64_t j = 0; j < width && !is_sent; ++j) {
        const std::size_t at = i * job.spec.row_elems + part * width + j;
        is_sent = is_nonzero(load(data.values, at, job.spec.dtype), job.spec.dtype);
      }
      if (is_sent) units.push_back(data.rows[i] * parts + part);
    }
  }
  return units;
}

std::vector<std::vector<UnitId>> all_units(const Case& job, std::uint64_t width) {
  std::vector<std::vector<UnitId>> units;
  for (std::size_t rank = 0; rank < job.ranks.size(); ++rank) {
    units.push_back(units_of(job, rank, width));
  }
  return units;
}

bool ascends(const std::vector<std::int64_t>& rows) {
  return std::adjacent_find(rows.begin(), rows.end(), std::greater_equal<>()) == rows.end();
}

TrafficInput input_of(const Case& job, const JobReport& report, const WireOptions& wire,
                      const std::string& name) {
  TrafficInput input;
  input.size = job.spec.size;
  input.spec = {job.spec.rows, job.spec.row_elems, job.spec.dtype,
                is_coo(job.spec.storage) ? Layout::kCoo : Layout::kDense};
  input.plan = {report.scheme, report.width, report.chunk_ends};
  input.wire = wire;
  input.key = key_of(name);
  return input;
}

/// Runs `spec` in `group` and compares; the group runs nothing else meanwhile.
void compare(const CaseSpec& spec, const std::string& name, const EngineOptions& options,
             Group& group) {
  const Case before = make_case(spec);
  Case job = before;
  std::vector<WireCount> start;
  for (int rank = 0; rank < spec.size; ++rank) start.push_back(group.engine(rank).wire_count());
  Jobs jobs;
  ASSERT_TRUE(group.run(job, name, jobs));
  TrafficInput input = input_of(job, jobs[0]->report(), options.wire, name);
  const ExactCounts counts(all_units(before, std::max<std::uint64_t>(input.plan.width, 1)));
  input.counts = &counts;
  for (const RankData& data : before.ranks) input.coalesced.push_back(!ascends(data.coo_rows));
  const std::vector<RankTraffic> expected = traffic(input);
  ASSERT_EQ(expected.size(), static_cast<std::size_t>(spec.size));
  for (int rank = 0; rank < spec.size; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    const JobReport& report = jobs[r]->report();
    const WireCount end = group.engine(rank).wire_count();
    const std::string where = std::string(scheme_name(options.scheme)) + " " + label(spec) +
                              " codec " + std::to_string(static_cast<int>(options.wire.codec)) +
                              " rank " + std::to_string(rank);
    ASSERT_TRUE(jobs[r]->status().ok()) << where << jobs[r]->status().error().message;
    EXPECT_EQ(expected[r].sent_bytes, end.sent_bytes - start[r].sent_bytes) << where;
    EXPECT_EQ(expected[r].received_bytes, end.received_bytes - start[r].received_bytes) << where;
    EXPECT_EQ(report.sent_bytes, expected[r].sent_bytes) << where;
    EXPECT_EQ(report.received_bytes, expected[r].received_bytes) << where;
    if (options.scheme == SchemeId::kDenseRing || input.spec.elems() == 0) continue;
    EXPECT_EQ(report.units, units_of(before, r, input.plan.width).size()) << where;
  }
}

class Traffic : public ::testing::TestWithParam<SchemeId> {
 protected:
  void compare_all(const EngineOptions& options, const std::vector<CaseSpec>& forms) {
    for (int size = 1; size <= 9; ++size) {
      Group group(size, options);
      int number = 0;
      for (CaseSpec spec : forms) {
        if (is_coo(spec.storage) && options.scheme == SchemeId::kDenseRing) continue;
        spec.size = size;
        for (Pattern pattern : kAllPatterns) {
          spec.pattern = pattern;
          spec.seed = static_cast<std::uint64_t>(++number);
          std::string name = std::to_string(number);
          name += " of traffic";
          ASSERT_NO_FATAL_FAILURE(compare(spec, name, options, group));
        }
      }
    }
  }
  static CaseSpec form(DType dtype, Storage storage, std::uint64_t rows, std::uint64_t row_elems) {
    return {1, dtype, storage, rows, row_elems};
  }
};

TEST_P(Traffic, EqualsTheWireUnderEachCodec) {
  for (IndexCodec policy : kPolicies) {
    EngineOptions options = options_of(GetParam());
    options.wire.codec = policy;
    compare_all(options, {form(DType::kF32, Storage::kDense, 3001, 1),
                          form(DType::kF16, Storage::kDense, 151, 64),
                          form(DType::kF64, Storage::kDenseIds, 151, 16),
                          form(DType::kBF16, Storage::kCoo, 701, 3)});
    if (GetParam() == SchemeId::kDenseRing) break;
  }
}

TEST_P(Traffic, EqualsTheWireWithoutDigestsAndByRanges) {
  EngineOptions options = options_of(GetParam());
  options.wire.verify = false;
  options.wire.partition = PartitionKind::kRange;
  compare_all(options, {form(DType::kI32, Storage::kDense, 3001, 1),
                        form(DType::kI64, Storage::kCoo, 151, 16)});
}

TEST_P(Traffic, EqualsTheWireForTensorsWithoutElements) {
  compare_all(options_of(GetParam()),
              {form(DType::kF32, Storage::kDense, 0, 1), form(DType::kF32, Storage::kDense, 1, 1),
               form(DType::kF32, Storage::kDense, 5, 0)});
}

TEST_P(Traffic, EqualsTheWireForDuplicatedEntries) {
  compare_all(options_of(GetParam()), {form(DType::kF32, Storage::kCooDuplicates, 701, 3),
                                       form(DType::kI64, Storage::kCooDuplicates, 701, 1),
                                       form(DType::kBF16, Storage::kCooDuplicates, 701, 3),
                                       form(DType::kF16, Storage::kCooDuplicates, 151, 1)});
}

/// Many blocks and, from the second job of a name on, several chunks cut by the histogram.
TEST_P(Traffic, EqualsTheWireOverManyBlocksAndChunks) {
  for (int size : {3, 8}) {
    EngineOptions options = options_of(GetParam());
    options.max_bytes = 256 * 1024;
    Group group(size, options);
    for (Pattern pattern : kAllPatterns) {
      for (int round = 0; round < 2; ++round) {
        CaseSpec spec{size, DType::kF32, Storage::kDense, 300007, 1, pattern};
        spec.density = 0.01;
        spec.seed = static_cast<std::uint64_t>(round) + 5;
        ASSERT_NO_FATAL_FAILURE(compare(spec, std::string(pattern_name(pattern)), options, group));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Traffic, ::testing::ValuesIn(kSchemes),
                         [](const auto& given) { return std::string(scheme_name(given.param)); });

TrafficInput small_input(const UnitCounts& counts) {
  TrafficInput input;
  input.size = 3;
  input.spec = {99, 1, DType::kF32, Layout::kDense};
  input.plan = {SchemeId::kBalanced, 1, {33}};
  input.key = 5;
  input.counts = &counts;
  return input;
}

/// Control: one unit more, another key's owners, or a width of 2 give other bytes.
TEST(TrafficControl, OtherCountsGiveOtherBytes) {
  const ExactCounts few({{1, 2, 3}, {}, {50}});
  const ExactCounts more({{1, 2, 3, 80}, {}, {50}});
  const auto total = [](const std::vector<RankTraffic>& ranks) {
    std::uint64_t bytes = 0;
    for (const RankTraffic& rank : ranks) bytes += rank.sent_bytes;
    return bytes;
  };
  EXPECT_LT(total(traffic(small_input(few))), total(traffic(small_input(more))));
}

/// One ExactCounts serves any number of inputs: other keys, widths and schemes in between change
/// nothing.
TEST(TrafficInputs, CountsMayBeUsedAgainForAnotherInput) {
  std::vector<std::vector<UnitId>> units(3);
  for (UnitId unit = 0; unit < 30; ++unit) units[unit % 2].push_back(unit * 3);
  const ExactCounts shared(units);
  for (std::uint64_t key = 1; key < 20; ++key) {
    for (SchemeId scheme : kSchemes) {
      const ExactCounts own(units);
      TrafficInput with_own = small_input(own);
      TrafficInput with_shared = small_input(shared);
      with_own.key = with_shared.key = key;
      with_own.plan.scheme = with_shared.plan.scheme = scheme;
      const auto a = traffic(with_own);
      const auto b = traffic(with_shared);
      for (std::size_t rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(a[rank].sent_bytes, b[rank].sent_bytes) << "key " << key;
        EXPECT_EQ(a[rank].received_bytes, b[rank].received_bytes) << "key " << key;
      }
    }
  }
}

TEST(TrafficInputs, AutoAndDenseSendNothingOfOurs) {
  const ExactCounts counts({{1}, {2}, {3}});
  for (SchemeId scheme : {SchemeId::kAuto, SchemeId::kDense}) {
    TrafficInput input = small_input(counts);
    input.plan.scheme = scheme;
    for (const RankTraffic& rank : traffic(input)) EXPECT_EQ(rank.sent_bytes, 0U);
  }
}

}  // namespace
}  // namespace zensync::test
