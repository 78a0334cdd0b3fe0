// Ranks that disagree, invalid input on one rank, closing: an error on every rank within bounds,
// never a hang. Place: tests of the engine. All waits are bounded; a wait that ends by its bound is
// a failure.
#include <gtest/gtest.h>

#include <thread>
#include <tuple>

#include "group.hpp"

namespace zensync::test {
namespace {

constexpr milliseconds kSoon{2000};

using Param = std::tuple<SchemeId, int>;

class Trouble : public ::testing::TestWithParam<Param> {
 protected:
  SchemeId scheme() const { return std::get<0>(GetParam()); }
  int size() const { return std::get<1>(GetParam()); }
  CaseSpec plain() const {
    CaseSpec spec{size(), DType::kF32, Storage::kDense, 600, 4, Pattern::kUniform};
    spec.density = 0.2;
    return spec;
  }

  /// Whether each rank has the first message of every other, and there are enough to tell.
  bool sees_all() const {
    const bool is_direct = scheme() == SchemeId::kBalanced || scheme() == SchemeId::kAgSparse;
    return is_direct && size() > 2;
  }

  /// culprit: which all must name; −1 for any.
  void expect_mismatch(const Jobs& jobs, int culprit = -1) {
    ASSERT_TRUE(wait_all(jobs, kSoon)) << "a hang";
    for (const auto& done : jobs) {
      ASSERT_FALSE(done->status().ok());
      if (culprit >= 0) {
        EXPECT_EQ(done->status().error().culprit.value, culprit) << done->status().error().message;
      }
      EXPECT_EQ(done->status().error().kind, ErrorKind::kMismatch)
          << done->status().error().message;
    }
  }

  /// Rank `odd` submits `other`, the rest `plain`; then every rank's error is of `kind`.
  void expect_all_fail(CaseSpec other, const std::string& other_name, ErrorKind kind) {
    for (int odd : {0, size() - 1}) {
      Case most = make_case(plain());
      Case one = make_case(other);
      Group group(size(), options_of(scheme()));
      Jobs jobs;
      for (int rank = 0; rank < size(); ++rank) {
        jobs.push_back(group.engine(rank).submit(rank == odd ? job_of(one, rank, other_name)
                                                             : job_of(most, rank, "t")));
      }
      ASSERT_TRUE(wait_all(jobs, kSoon)) << "a hang";
      for (std::size_t r = 0; r < jobs.size(); ++r) {
        ASSERT_FALSE(jobs[r]->status().ok()) << "rank " << r;
        EXPECT_EQ(jobs[r]->status().error().kind, kind)
            << "rank " << r << ": " << jobs[r]->status().error().message;
        if (kind == ErrorKind::kMismatch && sees_all()) {
          EXPECT_EQ(jobs[r]->status().error().culprit.value, odd)
              << "rank " << r << ": " << jobs[r]->status().error().message;
        }
        EXPECT_FALSE(group.engine(static_cast<int>(r)).status().ok());
      }
    }
  }
};

TEST_P(Trouble, AnotherShape) {
  CaseSpec other = plain();
  other.rows = 601;
  expect_all_fail(other, "t", ErrorKind::kMismatch);
  other.rows = 1200;
  other.row_elems = 2;
  expect_all_fail(other, "t", ErrorKind::kMismatch);
  other.rows = 0;
  expect_all_fail(other, "t", ErrorKind::kMismatch);
  other.rows = 90000;
  other.row_elems = 64;
  expect_all_fail(other, "t", ErrorKind::kMismatch);
}

TEST_P(Trouble, AnotherDtype) {
  for (DType dtype : {DType::kF64, DType::kBF16, DType::kI32}) {
    CaseSpec other = plain();
    other.dtype = dtype;
    expect_all_fail(other, "t", ErrorKind::kMismatch);
  }
}

TEST_P(Trouble, AnotherLayout) {
  CaseSpec other = plain();
  other.storage = Storage::kCoo;
  const bool is_ring = scheme() == SchemeId::kDenseRing;  // refuses COO before it sends anything
  expect_all_fail(other, "t", is_ring ? ErrorKind::kUnsupported : ErrorKind::kMismatch);
}

TEST_P(Trouble, AnotherOperation) {
  CaseSpec other = plain();
  other.op = ReduceOp::kAvg;
  expect_all_fail(other, "t", ErrorKind::kMismatch);
}

TEST_P(Trouble, AnotherName) { expect_all_fail(plain(), "u", ErrorKind::kMismatch); }

TEST_P(Trouble, AnotherOrder) {
  Case a = make_case(plain());
  Case b = make_case(plain());
  Group group(size(), options_of(scheme()));
  Jobs jobs;
  for (int rank = 0; rank < size(); ++rank) {
    Case& first = rank == 1 ? b : a;
    Case& second = rank == 1 ? a : b;
    jobs.push_back(group.engine(rank).submit(job_of(first, rank, rank == 1 ? "b" : "a")));
    jobs.push_back(group.engine(rank).submit(job_of(second, rank, rank == 1 ? "a" : "b")));
  }
  expect_mismatch(jobs);
}

/// Another scheme, codec, partition or digest setting on one rank.
TEST_P(Trouble, OtherSettings) {
  for (int variant = 0; variant < 2; ++variant) {
    Case job = make_case(plain());
    std::vector<std::unique_ptr<Engine>> engines;
    int rank = 0;
    for (auto& driver : make_loopback(size())) {
      EngineOptions options = options_of(scheme());
      if (rank++ == 1) {
        if (variant == 0)
          options.scheme =
              scheme() == SchemeId::kAgSparse ? SchemeId::kBalanced : SchemeId::kAgSparse;
        if (variant == 1) options.max_bytes = 1024;
      }
      engines.push_back(make_engine(std::move(driver), options));
    }
    if (variant == 1 && scheme() != SchemeId::kBalanced) break;  // the bound cuts balanced only
    Jobs jobs;
    for (rank = 0; rank < size(); ++rank) {
      jobs.push_back(engines[static_cast<std::size_t>(rank)]->submit(job_of(job, rank, "t")));
    }
    expect_mismatch(jobs);
    for (auto& engine : engines) engine->close(milliseconds(500));
  }
}

/// One rank reduces densely what the others send sparse, or is at an agreement about something
/// else.
TEST_P(Trouble, AnAgreementMeetsAJob) {
  const TensorSpec tensor{600, 4, DType::kF32, Layout::kDense};
  for (int odd : {0, size() - 1}) {
    for (std::size_t items : {1, 2}) {
      Case job = make_case(plain());
      Group group(size(), options_of(scheme()));
      const std::vector<DenseItem> wanted(items, {"t", tensor, nullptr, ReduceOp::kSum, false});
      Jobs jobs;
      for (int rank = 0; rank < size(); ++rank) {
        jobs.push_back(rank == odd ? group.engine(rank).agree(wanted)
                                   : group.engine(rank).submit(job_of(job, rank, "t")));
      }
      expect_mismatch(jobs, sees_all() ? odd : -1);
    }
  }
}

TEST_P(Trouble, AgreementsAboutOtherTensors) {
  const DenseItem a{"a", {100, 4, DType::kF32, Layout::kDense}, nullptr, ReduceOp::kAvg, false};
  DenseItem shape = a;
  shape.spec.rows = 101;
  DenseItem dtype = a;
  dtype.spec.dtype = DType::kBF16;
  DenseItem name = a;
  name.name = "b";
  DenseItem op = a;
  op.op = ReduceOp::kSum;
  for (const auto& other : std::vector<std::vector<DenseItem>>{
           {shape, a}, {a, dtype}, {name, a}, {a, op}, {a}, {}, {a, a, a}}) {
    Group group(size(), options_of(scheme()));
    Jobs jobs;
    for (int rank = 0; rank < size(); ++rank) {
      jobs.push_back(group.engine(rank).agree(rank == 1 ? other : std::vector<DenseItem>{a, a}));
    }
    expect_mismatch(jobs, size() > 2 ? 1 : -1);
  }
}

/// A row that is out of range on one rank only: that rank's error reaches the others.
TEST_P(Trouble, InvalidRowsOnOneRank) {
  for (Storage storage : {Storage::kCoo, Storage::kCooDuplicates, Storage::kDenseIds}) {
    if (scheme() == SchemeId::kDenseRing && is_coo(storage)) continue;
    for (std::int64_t bad : {std::int64_t{600}, std::int64_t{-1}}) {
      CaseSpec spec = plain();
      spec.storage = storage;
      Case job = make_case(spec);
      RankData& data = job.ranks.back();
      (storage == Storage::kDenseIds ? data.ids : data.coo_rows).back() = bad;
      Group group(size(), options_of(scheme()));
      Jobs jobs = group.submit(job, "t");
      ASSERT_TRUE(wait_all(jobs, kSoon)) << "a hang";
      for (const auto& done : jobs) {
        ASSERT_FALSE(done->status().ok());
        EXPECT_EQ(done->status().error().kind, ErrorKind::kInvalid)
            << done->status().error().message;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Trouble,
                         ::testing::Combine(::testing::ValuesIn(kSchemes),
                                            ::testing::Values(2, 3, 5, 8)),
                         [](const auto& given) {
                           return std::string(scheme_name(std::get<0>(given.param))) + "_n" +
                                  std::to_string(std::get<1>(given.param));
                         });

/// A job that only some ranks submit, then close: back within the bound, and the job has an error.
TEST(Lifecycle, CloseWithJobsInFlightReturnsInTime) {
  for (SchemeId scheme : kSchemes) {
    Case job = make_case({3, DType::kF32, Storage::kDense, 500, 1, Pattern::kUniform});
    Group group(3, options_of(scheme));
    Jobs jobs = {group.engine(0).submit(job_of(job, 0, "a")),
                 group.engine(0).submit(job_of(job, 0, "b"))};
    EXPECT_FALSE(jobs[0]->wait_until(Clock::now() + milliseconds(20)));
    const auto start = Clock::now();
    group.engine(0).close(milliseconds(200));
    EXPECT_LT(Clock::now() - start, kSoon);
    ASSERT_TRUE(wait_all(jobs, milliseconds(100)));
    for (const auto& done : jobs) EXPECT_FALSE(done->status().ok());
    group.engine(0).close(milliseconds(200));
  }
}

TEST(Lifecycle, CloseWaitsForRunningJobs) {
  Case job = make_case({4, DType::kF32, Storage::kDense, 200003, 1, Pattern::kFull});
  const Sum expected = oracle(job);
  Group group(4, options_of(SchemeId::kBalanced));
  Jobs jobs = group.submit(job, "t");
  std::vector<std::thread> closers;
  for (int rank = 0; rank < 4; ++rank) {
    closers.emplace_back([&group, rank] { group.engine(rank).close(kPatience); });
  }
  for (auto& closer : closers) closer.join();
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_TRUE(jobs[static_cast<std::size_t>(rank)]->done());
    EXPECT_TRUE(holds(job, rank, *jobs[static_cast<std::size_t>(rank)], expected));
  }
}

TEST(Lifecycle, SubmitAfterCloseFailsAtOnce) {
  Case job = make_case({2, DType::kF32, Storage::kDense, 500, 1, Pattern::kUniform});
  Group group(2, options_of(SchemeId::kBalanced));
  group.close();
  const auto late = group.engine(0).submit(job_of(job, 0, "t"));
  ASSERT_TRUE(late->wait_until(Clock::now() + kSoon));
  EXPECT_FALSE(late->status().ok());
  const auto agreement = group.engine(1).agree({});
  ASSERT_TRUE(agreement->wait_until(Clock::now() + kSoon));
  EXPECT_FALSE(agreement->status().ok());
}

/// After one rank aborts, all jobs of all ranks fail with its reason, queued ones too.
TEST(Lifecycle, AbortReachesEveryRank) {
  Case job = make_case({3, DType::kF32, Storage::kDense, 500, 1, Pattern::kUniform});
  Group group(3, options_of(SchemeId::kAgSparse));
  Jobs jobs = {group.engine(0).submit(job_of(job, 0, "a")),
               group.engine(0).submit(job_of(job, 0, "b")),
               group.engine(1).submit(job_of(job, 1, "a"))};
  group.engine(2).abort(make_error(ErrorKind::kCapacity, "no room left"));
  ASSERT_TRUE(wait_all(jobs, kSoon));
  for (const auto& done : jobs) {
    ASSERT_FALSE(done->status().ok());
    EXPECT_EQ(done->status().error().kind, ErrorKind::kCapacity);
    EXPECT_NE(done->status().error().message.find("no room left"), std::string::npos);
  }
}

TEST(Lifecycle, ADeadlineEndsAJob) {
  Case job = make_case({2, DType::kF32, Storage::kDense, 500, 1, Pattern::kUniform});
  EngineOptions options = options_of(SchemeId::kBalanced);
  options.deadline = milliseconds(100);
  Group group(2, options);
  const auto alone = group.engine(0).submit(job_of(job, 0, "t"));
  ASSERT_TRUE(alone->wait_until(Clock::now() + kSoon));
  ASSERT_FALSE(alone->status().ok());
  EXPECT_EQ(alone->status().error().kind, ErrorKind::kDeadline);
}

/// Two groups in one process, jobs interleaved: neither waits for the other, results do not mix.
TEST(Lifecycle, TwoEnginesAtOnce) {
  Group first(3, options_of(SchemeId::kBalanced));
  Group second(3, options_of(SchemeId::kRecursiveDoubling));
  Case stuck = make_case({3, DType::kF32, Storage::kDense, 300, 1, Pattern::kFull});
  const auto waiting = first.engine(0).submit(job_of(stuck, 0, "stuck"));
  for (std::uint64_t i = 0; i < 20; ++i) {
    CaseSpec spec{3, DType::kF64, Storage::kDense, 3001, 1, Pattern::kUniform};
    spec.seed = i;
    Case job = make_case(spec);
    const Sum expected = oracle(job);
    Jobs jobs;
    ASSERT_TRUE(second.run(job, "t", jobs));
    for (int rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(holds(job, rank, *jobs[static_cast<std::size_t>(rank)], expected));
    }
  }
  EXPECT_FALSE(waiting->done());
  Jobs rest = {waiting};
  for (int rank : {1, 2}) rest.push_back(first.engine(rank).submit(job_of(stuck, rank, "stuck")));
  ASSERT_TRUE(wait_all(rest));
  for (const auto& done : rest) EXPECT_TRUE(done->status().ok());
}

/// Control: what the mismatch tests submit is fine when all ranks submit the same.
TEST_P(Trouble, ControlNoTroubleWhenAllAgree) {
  Case job = make_case(plain());
  const Sum expected = oracle(job);
  Group group(size(), options_of(scheme()));
  Jobs jobs;
  ASSERT_TRUE(group.run(job, "t", jobs));
  for (int rank = 0; rank < size(); ++rank) {
    EXPECT_TRUE(holds(job, rank, *jobs[static_cast<std::size_t>(rank)], expected));
  }
}

}  // namespace
}  // namespace zensync::test
