// Scheme `auto` over many jobs of one tensor: sparsity changes, plans change with it, results stay
// right, all ranks choose alike; to dense above 0.15, back below 0.10 by the probe of every 64th
// round. Place: tests of the engine. The caller's part of Outcome::kUseDense (a dense all-reduce)
// is not run here.
#include <gtest/gtest.h>

#include <set>

#include "group.hpp"
#include "zensync/base/hash.hpp"

namespace zensync::test {
namespace {

constexpr int kRanks = 4;

CaseSpec table(double density, std::uint64_t seed) {
  CaseSpec spec{kRanks, DType::kF32, Storage::kDense, 2003, 16, Pattern::kUniform};
  spec.density = density;
  spec.seed = seed;
  return spec;
}

class AutoScheme : public ::testing::Test {
 protected:
  AutoScheme() : group_(kRanks, options_of(SchemeId::kAuto)) {}

  /// One round on all ranks, dense allowed; checks agreement and memory, returns the outcome.
  Outcome round(Case job, const std::string& name = "table") {
    const Case before = job;
    const bool was_to_be_dense = would_be_dense(before.spec, name);
    Jobs jobs;
    for (int rank = 0; rank < kRanks; ++rank) {
      JobSpec spec = job_of(job, rank, name);
      spec.allow_dense = true;
      jobs.push_back(group_.engine(rank).submit(spec));
    }
    EXPECT_TRUE(wait_all(jobs));
    const Outcome outcome = jobs[0]->outcome();
    EXPECT_EQ(outcome == Outcome::kUseDense, was_to_be_dense);
    const Sum expected = oracle(before);
    for (std::size_t r = 0; r < kRanks; ++r) {
      EXPECT_TRUE(jobs[r]->status().ok());
      EXPECT_EQ(jobs[r]->outcome(), outcome);
      EXPECT_EQ(jobs[r]->report().scheme, jobs[0]->report().scheme);
      EXPECT_EQ(jobs[r]->report().width, jobs[0]->report().width);
      EXPECT_EQ(jobs[r]->report().chunk_ends, jobs[0]->report().chunk_ends);
      if (outcome == Outcome::kUseDense) {
        EXPECT_TRUE(same_bytes(before.ranks[r].dense, job.ranks[r].dense, before.spec.dtype));
      } else {
        EXPECT_TRUE(holds(job, static_cast<int>(r), *jobs[r], expected)) << label(job.spec);
      }
    }
    schemes_.insert(jobs[0]->report().scheme);
    return outcome;
  }

  bool would_be_dense(const CaseSpec& spec, const std::string& name) {
    const TensorSpec tensor{spec.rows, spec.row_elems, spec.dtype,
                            is_coo(spec.storage) ? Layout::kCoo : Layout::kDense};
    const bool first = group_.engine(0).would_be_dense(name, tensor, false);
    for (int rank = 1; rank < kRanks; ++rank) {
      EXPECT_EQ(group_.engine(rank).would_be_dense(name, tensor, false), first);
    }
    return first;
  }

  /// Dense rounds with `density` until one is sparse again, at most `most`.
  int rounds_until_sparse(double density, int most) {
    for (int count = 0; count < most; ++count) {
      if (round(make_case(table(density, static_cast<std::uint64_t>(count) + 900))) ==
          Outcome::kDone) {
        return count;
      }
    }
    return most;
  }

  Group group_;
  std::set<SchemeId> schemes_;
};

TEST_F(AutoScheme, ResultsStayRightWhileSparsityChanges) {
  const double densities[] = {0.001, 0.01, 0.05, 0.11, 0.0, 0.002, 0.11, 0.03};
  std::uint64_t seed = 1;
  for (int turn = 0; turn < 3; ++turn) {
    for (double density : densities) {
      for (Pattern pattern : {Pattern::kUniform, Pattern::kIdentical, Pattern::kOneRank}) {
        CaseSpec spec = table(density, ++seed);
        spec.pattern = pattern;
        EXPECT_EQ(round(make_case(spec)), Outcome::kDone);
      }
    }
  }
  EXPECT_GT(schemes_.size(), 1U) << "the plan never changed";
}

TEST_F(AutoScheme, ManyTensorsOfAllLayoutsKeepTheirOwnCounts) {
  for (int turn = 0; turn < 6; ++turn) {
    for (Storage storage : {Storage::kDense, Storage::kCoo, Storage::kDenseIds}) {
      for (std::uint64_t row_elems : {1, 48}) {
        CaseSpec spec = table(0.01 + 0.02 * turn, static_cast<std::uint64_t>(turn) + 40);
        spec.storage = storage;
        spec.row_elems = row_elems;
        const std::string name = std::to_string(static_cast<int>(storage) * 100 + row_elems);
        EXPECT_EQ(round(make_case(spec), name), Outcome::kDone);
      }
    }
  }
}

TEST_F(AutoScheme, GoesDenseAboveTheThresholdAndComesBackByAProbe) {
  EXPECT_EQ(round(make_case(table(0.05, 1))), Outcome::kDone);
  EXPECT_EQ(round(make_case(table(0.13, 2))), Outcome::kDone);
  EXPECT_EQ(round(make_case(table(0.13, 3))), Outcome::kDone) << "0.13 is below 0.15";
  EXPECT_EQ(round(make_case(table(0.25, 4))), Outcome::kDone) << "still planned from 0.13";
  EXPECT_EQ(round(make_case(table(0.25, 5))), Outcome::kUseDense);
  EXPECT_EQ(rounds_until_sparse(0.125, 140), 140) << "0.125 lies between the thresholds";
  const int back = rounds_until_sparse(0.03, 70);
  EXPECT_LE(back, 64);
  EXPECT_EQ(round(make_case(table(0.03, 6))), Outcome::kDone);
}

/// One rank's density decides, in both directions.
TEST_F(AutoScheme, TheDensestRankDecides) {
  const auto uneven = [](double density, std::uint64_t seed) {
    Case job = make_case(table(0.01, seed));
    job.ranks[2] = make_case(table(density, seed)).ranks[2];
    return job;
  };
  EXPECT_EQ(round(uneven(0.3, 1)), Outcome::kDone);
  for (std::uint64_t i = 0; i < 66; ++i) ASSERT_EQ(round(uneven(0.3, 2 + i)), Outcome::kUseDense);
}

/// `agree`: dense tensors are checked together and probed; one may become sparse.
TEST_F(AutoScheme, AgreementsProbeTensors) {
  const Case job = make_case(table(0.02, 3));
  const TensorSpec spec{2003, 16, DType::kF32, Layout::kDense};
  const TensorSpec bias{100, 1, DType::kF32, Layout::kDense};
  EXPECT_TRUE(group_.engine(0).would_be_dense("table", spec, true));
  int rounds = 0;
  while (group_.engine(0).would_be_dense("table", spec, true) && rounds < 70) {
    ++rounds;
    Jobs jobs;
    for (int rank = 0; rank < kRanks; ++rank) {
      const void* data = job.ranks[static_cast<std::size_t>(rank)].dense.data();
      jobs.push_back(group_.engine(rank).agree({{"bias", bias, nullptr, ReduceOp::kAvg, false},
                                                {"table", spec, data, ReduceOp::kAvg, true}}));
    }
    ASSERT_TRUE(wait_all(jobs));
    for (const auto& done : jobs) ASSERT_TRUE(done->status().ok());
  }
  EXPECT_LE(rounds, 65);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_FALSE(group_.engine(rank).would_be_dense("table", spec, true));
    EXPECT_TRUE(group_.engine(rank).would_be_dense("bias", bias, true));
  }
}

TEST_F(AutoScheme, StartsDenseWhereAskedTo) {
  Case job = make_case(table(0.3, 3));
  Jobs jobs;
  for (int rank = 0; rank < kRanks; ++rank) {
    JobSpec spec = job_of(job, rank, "t");
    spec.allow_dense = spec.starts_dense = true;
    jobs.push_back(group_.engine(rank).submit(spec));
  }
  ASSERT_TRUE(wait_all(jobs));
  for (const auto& done : jobs) EXPECT_EQ(done->outcome(), Outcome::kUseDense);
}

/// The same sequence in fresh engines gives the same plans and bits (inexact values, schemes
/// change).
TEST(AutoRepeat, TheSameSequenceGivesTheSameBits) {
  const auto run = [] {
    std::uint64_t digest = 1;
    Group group(kRanks, options_of(SchemeId::kAuto));
    for (std::uint64_t i = 0; i < 12; ++i) {
      CaseSpec spec = table(i % 4 == 0 ? 0.002 : 0.1, i);
      spec.values = Values::kInexact;
      Case job = make_case(spec);
      Jobs jobs;
      if (!group.run(job, "t", jobs)) return std::uint64_t{0};
      digest = mix64(digest ^ static_cast<std::uint64_t>(jobs[0]->report().scheme));
      for (const RankData& data : job.ranks) {
        EXPECT_TRUE(same_bytes(job.ranks[0].dense, data.dense, spec.dtype));
        digest = mix64(digest ^ digest64(data.dense.data(), data.dense.size()));
      }
    }
    return digest;
  };
  EXPECT_EQ(run(), run());
}

}  // namespace
}  // namespace zensync::test
