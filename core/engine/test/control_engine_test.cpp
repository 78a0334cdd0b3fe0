// Engines over the native mesh with control connections: whatever goes wrong, all ranks end with
// the same error, and know whom they wait for. Place: tests of the engine. Ranks are threads of one
// process; a wait that ends by its bound is a failure, never a hang.
#include <optional>
#include <thread>

#include "control_worlds.hpp"
#include "group.hpp"

namespace zensync::test {
namespace {

struct NativePlan {
  EngineOptions engine = options_of(SchemeId::kBalanced);
  std::function<void(ControlOptions&)> change = {};
  std::function<std::unique_ptr<Driver>(std::unique_ptr<Driver>)> wrap = {};
  bool has_control = true;
};

/// n engines over a native mesh; the owner may take one away before the others.
class NativeGroup {
 public:
  explicit NativeGroup(int size, const NativePlan& plan = {})
      : engines_(static_cast<std::size_t>(size)) {
    on_ranks(size, [&](int rank) {
      std::shared_ptr<Rendezvous> files = make_file_rendezvous(folder_.path());
      auto driver = open_native_mesh(mesh_options(rank, size), *files);
      ASSERT_TRUE(driver.ok()) << driver.error().message;
      if (plan.wrap) driver.value() = plan.wrap(std::move(driver.value()));
      std::unique_ptr<Control> control;
      if (plan.has_control) {
        ControlOptions options = control_options(rank, size);
        if (plan.change) plan.change(options);
        auto opened = open_control(options, files);
        ASSERT_TRUE(opened.ok()) << opened.error().message;
        control = std::move(opened.value());
      }
      engines_[static_cast<std::size_t>(rank)] =
          make_engine(std::move(driver.value()), plan.engine, std::move(control));
    });
  }
  int size() const { return static_cast<int>(engines_.size()); }
  Engine& engine(int rank) { return *engines_[static_cast<std::size_t>(rank)]; }
  void destroy(int rank) { engines_[static_cast<std::size_t>(rank)].reset(); }
  Jobs submit(Case& job, const std::string& name, int ranks) {
    Jobs jobs;
    for (int rank = 0; rank < ranks; ++rank) {
      jobs.push_back(engine(rank).submit(job_of(job, rank, name)));
    }
    return jobs;
  }

 private:
  TemporaryFolder folder_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

Case small_job(int size, std::uint64_t rows = 300) {
  CaseSpec spec{size, DType::kF32, Storage::kDense, rows, 1, Pattern::kUniform};
  spec.density = 0.2;
  return make_case(spec);
}

/// What all jobs ended with; empty, with a failure noted, where one ended well, late, or otherwise.
std::optional<Error> common_error(const Jobs& jobs) {
  if (!wait_all(jobs)) {
    ADD_FAILURE() << "a hang";
    return {};
  }
  for (const auto& job : jobs) {
    if (job->status().ok()) {
      ADD_FAILURE() << "a job ended well";
      return {};
    }
    EXPECT_TRUE(ControlWorld::same_error(job->status().error(), jobs[0]->status().error()))
        << job->status().error().message << " / " << jobs[0]->status().error().message;
  }
  return jobs[0]->status().error();
}

/// Waits until the engine knows of a fault; false if it does not within a second.
bool fails_within_a_second(const Engine& engine) {
  const auto until = Clock::now() + 1s;
  while (engine.status().ok()) {
    if (Clock::now() > until) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

/// Sleeps in its first exchange, as a rank that is stalled by something else.
class SleepyDriver final : public Driver {
 public:
  SleepyDriver(std::unique_ptr<Driver> inner, milliseconds sleep)
      : inner_(std::move(inner)), sleep_(sleep) {}
  Rank rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const Topology& topology() const override { return inner_->topology(); }
  std::string name() const override { return "sleepy"; }
  Status exchange(const Exchange& exchange, Clock::time_point deadline) override {
    std::this_thread::sleep_for(std::exchange(sleep_, milliseconds{0}));
    return inner_->exchange(exchange, deadline);
  }
  Status flush(Clock::time_point deadline) override { return inner_->flush(deadline); }
  void abort(const Error& why) override { inner_->abort(why); }
  WireCount wire_count() const override { return inner_->wire_count(); }

 private:
  std::unique_ptr<Driver> inner_;
  milliseconds sleep_;
};

/// Makes the driver of `rank` sleepy, and leaves those of the others alone.
std::unique_ptr<Driver> sleepy(std::unique_ptr<Driver> driver, int rank, milliseconds sleep) {
  if (driver->rank().value != rank) return driver;
  return std::make_unique<SleepyDriver>(std::move(driver), sleep);
}

class ControlEngine : public ::testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }
};

TEST_P(ControlEngine, JobsEndWell) {
  NativeGroup group(size());
  for (const std::uint64_t rows : {300, 20000}) {
    Case job = small_job(size(), rows);
    const Sum expected = oracle(job);
    const Jobs jobs = group.submit(job, "t", size());
    ASSERT_TRUE(wait_all(jobs));
    for (int rank = 0; rank < size(); ++rank) {
      EXPECT_TRUE(holds(job, rank, *jobs[static_cast<std::size_t>(rank)], expected));
      EXPECT_TRUE(group.engine(rank).take_notices().empty());
    }
  }
  for (int rank = 0; rank < size(); ++rank) {
    group.destroy(rank);  // one after the other: no fault for those that are left
    for (int other = rank + 1; other < size(); ++other) {
      EXPECT_TRUE(group.engine(other).status().ok());
    }
  }
}

TEST_P(ControlEngine, OneRankWithAnotherShapeGivesOneErrorOnAll) {
  for (int round = 0; round < 10; ++round) {
    NativeGroup group(size());
    Case job = small_job(size());
    Case other = small_job(size(), 301);
    Jobs jobs;
    for (int rank = 0; rank < size(); ++rank) {
      jobs.push_back(group.engine(rank).submit(job_of(rank == 1 ? other : job, rank, "t")));
    }
    const auto error = common_error(jobs);
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->kind, ErrorKind::kMismatch) << error->message;
    EXPECT_EQ(error->tensor, "t");
    ASSERT_FALSE(HasFailure()) << round;
  }
}

/// The last rank goes with a job in flight, or before it has begun one.
TEST_P(ControlEngine, AnEngineThatGoesInTheMiddleIsNamedByAll) {
  const int last = size() - 1;
  for (const bool has_job : {true, false}) {
    NativePlan plan;
    plan.wrap = [last](std::unique_ptr<Driver> driver) {
      return sleepy(std::move(driver), last, 200ms);
    };
    NativeGroup group(size(), plan);
    Case job = small_job(size());
    Jobs jobs = group.submit(job, "t", has_job ? size() : last);
    std::this_thread::sleep_for(30ms);
    const auto start = Clock::now();
    group.destroy(last);
    const auto error = common_error(jobs);
    EXPECT_LT(Clock::now() - start, 2s);
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->kind, ErrorKind::kPeerLost) << error->message;
    EXPECT_EQ(error->culprit.value, last) << error->message;
    // Without a job its data connections end in good order too, and may be seen to do so first.
    const std::string reason = has_job ? "closed its State while jobs were in flight" : "";
    EXPECT_NE(error->message.find(reason), std::string::npos) << error->message;
  }
}

TEST_P(ControlEngine, AnIdleEngineLearnsOfAnAbort) {
  NativeGroup group(size());
  group.engine(0).abort(make_error(ErrorKind::kCapacity, "no room left", Rank{0}));
  Case job = small_job(size());
  for (int rank = 1; rank < size(); ++rank) {
    ASSERT_TRUE(fails_within_a_second(group.engine(rank)));
    const auto late = group.engine(rank).submit(job_of(job, rank, "t"));
    ASSERT_TRUE(late->wait_until(Clock::now() + 500ms));
    ASSERT_FALSE(late->status().ok());
    EXPECT_EQ(late->status().error().kind, ErrorKind::kCapacity);
    EXPECT_EQ(late->status().error().culprit.value, 0);
    EXPECT_NE(late->status().error().message.find("no room left"), std::string::npos);
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ControlEngine, ::testing::Values(2, 3, 5));

/// Control: without control connections an idle engine learns of nothing.
TEST(ControlEngineOff, AnIdleEngineLearnsNothing) {
  NativePlan plan;
  plan.has_control = false;
  NativeGroup group(2, plan);
  group.engine(0).abort(make_error(ErrorKind::kCapacity, "no room left", Rank{0}));
  std::this_thread::sleep_for(100ms);
  EXPECT_TRUE(group.engine(1).status().ok());
}

/// A ring of 3 whose rank 2 never submits: rank 1 waits for 0, and rank 0 for 2. Rank 1 begins
/// first, so that its deadline passes first.
Jobs submit_chain(NativeGroup& group, Case& job) {
  Jobs jobs = {group.engine(1).submit(job_of(job, 1, "t"))};
  std::this_thread::sleep_for(150ms);
  jobs.push_back(group.engine(0).submit(job_of(job, 0, "t")));
  return jobs;
}

NativePlan ring_with_a_deadline() {
  NativePlan plan;
  plan.engine = options_of(SchemeId::kDenseRing);
  plan.engine.deadline = 400ms;
  return plan;
}

TEST(ControlEngineDeadline, NamesTheRankThatIsBehind) {
  NativeGroup group(3, ring_with_a_deadline());
  Case job = small_job(3);
  const auto error = common_error(submit_chain(group, job));
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->kind, ErrorKind::kDeadline);
  EXPECT_EQ(error->culprit.value, 2) << error->message;
  EXPECT_NE(error->message.find("rank 2 is furthest behind"), std::string::npos) << error->message;
  EXPECT_TRUE(fails_within_a_second(group.engine(2)));  // though it submitted nothing
}

/// Control: the driver alone blames the rank that it waits for, which waits itself.
TEST(ControlEngineOff, ADeadlineBlamesTheRankBefore) {
  NativePlan plan = ring_with_a_deadline();
  plan.has_control = false;
  NativeGroup group(3, plan);
  Case job = small_job(3);
  const Jobs jobs = submit_chain(group, job);
  ASSERT_TRUE(wait_all(jobs));
  ASSERT_FALSE(jobs[0]->status().ok());
  EXPECT_EQ(jobs[0]->status().error().kind, ErrorKind::kDeadline);
  EXPECT_EQ(jobs[0]->status().error().culprit.value, 0) << jobs[0]->status().error().message;
}

TEST(ControlEngineNotices, ABusyRankIsWaitedForAndNamed) {
  NativePlan plan;
  plan.change = [](ControlOptions& options) {
    shorten(options);
    options.silent_after = 700ms;
  };
  plan.wrap = [](std::unique_ptr<Driver> driver) { return sleepy(std::move(driver), 1, 1200ms); };
  NativeGroup group(2, plan);
  Case job = small_job(2);
  const Sum expected = oracle(job);
  const Jobs jobs = group.submit(job, "t", 2);
  ASSERT_TRUE(wait_all(jobs));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(holds(job, rank, *jobs[static_cast<std::size_t>(rank)], expected));
  }
  std::this_thread::sleep_for(100ms);
  const auto notices = group.engine(0).take_notices();
  ASSERT_GE(notices.size(), 2U);
  EXPECT_NE(notices.front().find("waiting in 'push' of tensor 't' (job 1) for"), std::string::npos)
      << notices.front();
  EXPECT_NE(notices.back().find("is over after"), std::string::npos) << notices.back();
}

TEST(ControlEngineNotices, ADenseAllReduceOfTheCallerIsWatchedToo) {
  NativePlan plan;
  plan.change = [](ControlOptions& options) { options.warn_after = 100ms; };
  NativeGroup group(2, plan);
  group.engine(0).begin_dense("bias");
  std::vector<std::string> notices;
  for (const auto until = Clock::now() + kEnough; notices.empty() && Clock::now() < until;) {
    notices = group.engine(0).take_notices();
    std::this_thread::sleep_for(5ms);
  }
  ASSERT_FALSE(notices.empty());
  EXPECT_NE(notices[0].find("the dense all-reduce of tensor 'bias' for"), std::string::npos);
  EXPECT_NE(notices[0].find("rank 1 has not come to it, its process lives"), std::string::npos);
  group.engine(0).end_dense();
  EXPECT_TRUE(group.engine(1).take_notices().empty());
  EXPECT_TRUE(group.engine(0).status().ok());
}

TEST(ControlEngineNotices, AClosedEngineHasNone) {
  NativeGroup group(2);
  group.engine(0).close(milliseconds(100));
  group.engine(0).begin_dense("bias");
  group.engine(0).end_dense();
  EXPECT_TRUE(group.engine(0).take_notices().empty());
  EXPECT_TRUE(group.engine(1).status().ok());
}

}  // namespace
}  // namespace zensync::test
