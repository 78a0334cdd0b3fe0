// Reduce-scatters as jobs of the engine: random cases against a plain loop, among all-reduces of
// the same tensor; what one rank has wrong, which all ranks must be told; ranks that call another
// function. Place: tests of the engine. reduce_scatter_test.cpp has the scheme alone, the fault
// matrix its faults.
#include <gtest/gtest.h>

#include "group.hpp"
#include "shards.hpp"

namespace zensync::test {
namespace {

constexpr ShardLayout kLayouts[] = {ShardLayout::kRows, ShardLayout::kColumns};

/// Everything of a case, from its seed.
struct Drawn {
  CaseSpec spec;
  ShardLayout layout = ShardLayout::kRows;
  EngineOptions options;
};

std::uint64_t below(std::uint64_t seed, std::uint64_t stream, std::uint64_t n) {
  return mix64(mix64(seed) + stream) % n;
}

Drawn draw(std::uint64_t seed) {
  Drawn drawn;
  CaseSpec& spec = drawn.spec;
  spec.seed = seed;
  spec.size = 1 + static_cast<int>(below(seed, 1, 7));
  spec.dtype = kAllDTypes[below(seed, 2, 6)];
  drawn.layout = kLayouts[below(seed, 3, 2)];
  spec.rows = below(seed, 4, 20) == 0 ? 20000 + below(seed, 5, 40000) : below(seed, 5, 300);
  spec.row_elems = 1 + below(seed, 6, spec.rows > 300 ? 2 : 9);
  if (drawn.layout == ShardLayout::kColumns) {
    spec.row_elems *= static_cast<std::uint64_t>(spec.size);
  }
  spec.storage = below(seed, 7, 4) == 0 ? Storage::kDenseIds : Storage::kDense;
  spec.pattern = kAllPatterns[below(seed, 8, std::size(kAllPatterns))];
  spec.values = below(seed, 9, 2) == 0 ? Values::kSmallIntegers : Values::kInexact;
  constexpr double kDensities[] = {0.0, 0.02, 0.3, 1.0};
  spec.density = kDensities[below(seed, 10, 4)];
  if (is_float(spec.dtype) && below(seed, 11, 3) == 0) spec.op = ReduceOp::kAvg;
  drawn.options.scheme = kSchemes[below(seed, 12, 4)];
  drawn.options.wire.codec = kPolicies[below(seed, 13, 4)];
  drawn.options.wire.verify = below(seed, 14, 4) != 0;
  return drawn;
}

Jobs scatter(Group& group, Case& job, ShardOutputs& outputs) {
  Jobs jobs;
  for (int rank = 0; rank < group.size(); ++rank) {
    jobs.push_back(group.engine(rank).submit(outputs.into(job_of(job, rank, "tensor"), rank)));
  }
  EXPECT_TRUE(wait_all(jobs)) << "a hang";
  return jobs;
}

/// What is wrong with a run of `drawn`; null `spoil` for none.
::testing::AssertionResult run(const Drawn& drawn, bool spoil = false) {
  Case job = make_case(drawn.spec);
  Sum expected = oracle(job);
  if (spoil && !expected.dense.empty()) expected.dense.back() ^= std::byte{1};
  const std::vector<RankData> before = job.ranks;
  ShardOutputs outputs(drawn.spec, drawn.layout);
  Group group(drawn.spec.size, drawn.options);
  const Jobs jobs = scatter(group, job, outputs);
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    if (auto held = holds_shard(outputs, rank, *jobs[index], expected); !held) return held;
    if (job.ranks[index].dense != before[index].dense) {
      return ::testing::AssertionFailure() << "rank " << rank << ": the input was changed";
    }
  }
  if (!drawn.options.wire.verify || spoil) return ::testing::AssertionSuccess();
  Jobs sums;
  if (!group.run(job, "tensor", sums)) return ::testing::AssertionFailure() << "a hang";
  for (int rank = 0; rank < group.size(); ++rank) {
    auto held = holds(job, rank, *sums[static_cast<std::size_t>(rank)], expected);
    if (!held && drawn.spec.values == Values::kSmallIntegers) return held;
  }
  return ::testing::AssertionSuccess();
}

TEST(ShardJob, RandomCasesHoldTheirPartOfTheSum) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr std::uint64_t kCases = 200;
#else
  constexpr std::uint64_t kCases = 2000;
#endif
  for (std::uint64_t seed = 1; seed <= kCases; ++seed) {
    const Drawn drawn = draw(seed);
    ASSERT_TRUE(run(drawn)) << "seed " << seed << ", " << label(drawn.spec) << ", layout "
                            << static_cast<int>(drawn.layout);
  }
}

TEST(ShardJob, ControlAWrongBitIsSeen) {
  int seen = 0;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    if (draw(seed).spec.rows != 0 && !run(draw(seed), true)) ++seen;
  }
  EXPECT_GT(seen, 30);
}

TEST(ShardJob, ReportsWhatWentToWhom) {
  CaseSpec spec{4, DType::kF32, Storage::kDense, 400, 8, Pattern::kUniform};
  spec.density = 0.5;
  spec.values = Values::kInexact;  // no part of a row is zero by chance
  for (const ShardLayout layout : kLayouts) {
    Case job = make_case(spec);
    ShardOutputs outputs(spec, layout);
    Group group(spec.size);
    const Jobs jobs = scatter(group, job, outputs);
    for (std::size_t rank = 0; rank < jobs.size(); ++rank) {
      const JobReport& report = jobs[rank]->report();
      const std::uint64_t parts = layout == ShardLayout::kRows ? 1 : 4;
      EXPECT_EQ(report.call, parts == 1 ? JobCall::kScatterRows : JobCall::kScatterColumns);
      EXPECT_EQ(report.width, 8 / parts);
      EXPECT_EQ(report.units, job.ranks[rank].rows.size() * parts);
      ASSERT_EQ(report.shard.sent_units.size(), 4U);
      for (std::size_t peer = 0; peer < jobs.size(); ++peer) {
        EXPECT_EQ(report.shard.sent_units[peer], jobs[peer]->report().shard.received_units[rank]);
      }
      EXPECT_GT(report.sent_bytes, 0U);
    }
  }
}

TEST(ShardJob, WhatOneRankHasWrongAllAreTold) {
  const CaseSpec spec{2, DType::kF32, Storage::kDense, 40, 4, Pattern::kUniform};
  Case job = make_case(spec);
  ShardOutputs outputs(spec, ShardLayout::kRows);
  const JobSpec right = outputs.into(job_of(job, 0, "tensor"), 0);
  const JobSpec mine = outputs.into(job_of(job, 1, "tensor"), 1);
  const auto expect = [&](const JobSpec& wrong, ErrorKind kind, const std::string& words) {
    for (const Error& error : errors_of(right, wrong)) {
      EXPECT_EQ(error.kind, kind) << error.message;
      EXPECT_EQ(error.culprit, Rank{1}) << error.message;
      EXPECT_NE(error.message.find(words), std::string::npos) << error.message;
    }
    EXPECT_TRUE(outputs.is_untouched(0)) << words;
    EXPECT_TRUE(outputs.is_untouched(1)) << words;
  };
  JobSpec wrong = mine;
  wrong.shard->data = nullptr;
  expect(wrong, ErrorKind::kInvalid, "no memory");
  wrong.shard->data = job.ranks[1].dense.data() + 40 * 16 - 1;
  expect(wrong, ErrorKind::kInvalid, "share memory");
  wrong = mine;
  std::get<DenseView>(wrong.input).data = nullptr;
  expect(wrong, ErrorKind::kInvalid, "no memory");
  wrong = mine;
  wrong.shard->layout = ShardLayout::kColumns;
  std::get<DenseView>(wrong.input).row_elems = 3;
  expect(wrong, ErrorKind::kUnsupported, "3 elements");
  wrong = mine;
  wrong.input = CooView{nullptr, nullptr, 0, 40, 4, DType::kF32};
  expect(wrong, ErrorKind::kUnsupported, "dense-stored");
  const std::int64_t beyond = 40;
  wrong = mine;
  std::get<DenseView>(wrong.input).ids = &beyond;
  std::get<DenseView>(wrong.input).ids_count = 1;
  expect(wrong, ErrorKind::kInvalid, "row 40");
}

/// Both ends name what the other one calls.
TEST(ShardJob, RanksThatCallAnotherFunctionAreNamed) {
  const CaseSpec spec{2, DType::kF32, Storage::kDense, 40, 4, Pattern::kUniform};
  Case job = make_case(spec);
  ShardOutputs rows(spec, ShardLayout::kRows);
  ShardOutputs columns(spec, ShardLayout::kColumns);
  const JobSpec right = rows.into(job_of(job, 0, "tensor"), 0);
  const auto expect = [&](const JobSpec& wrong, const std::string& words) {
    const std::vector<Error> errors = errors_of(right, wrong);
    for (const Error& error : errors) {
      EXPECT_EQ(error.kind, ErrorKind::kMismatch) << error.message;
      EXPECT_EQ(error.tensor, "tensor");
    }
    const std::string both = errors[0].message + errors[1].message;
    EXPECT_NE(both.find("rows"), std::string::npos) << both;
    EXPECT_NE(both.find(words), std::string::npos) << both;
  };
  expect(columns.into(job_of(job, 1, "tensor"), 1), "columns");
  expect(job_of(job, 1, "tensor"), "all_reduce");
  EXPECT_TRUE(rows.is_untouched(0));
  EXPECT_TRUE(columns.is_untouched(1));
}

}  // namespace
}  // namespace zensync::test
