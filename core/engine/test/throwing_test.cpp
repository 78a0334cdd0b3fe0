// Memory that runs out while a job runs and again while the engine gives it up: every call ends
// with an error, and the process lives on. Place: tests of the engine.
// Drivers and a control that throw std::bad_alloc where a test asks for it; each lives in its
// engine, what it counts in the test. A wait that ends by its bound is a failure.
#include <gtest/gtest.h>

#include <atomic>
#include <new>

#include "group.hpp"

namespace zensync::test {
namespace {

/// Where memory runs out.
enum Where : unsigned { kRun = 1, kReport = 2, kAbort = 4, kSettle = 8, kAll = 15 };

struct Seen {
  std::atomic<int> reports{0};
  std::atomic<int> aborts{0};
  std::atomic<int> jobs_begun{0};
  std::atomic<int> jobs_ended{0};
  Control::Faults tell;
  Status truth;
};

class PoorDriver final : public Driver {
 public:
  PoorDriver(std::unique_ptr<Driver> inner, unsigned where, Seen& seen)
      : inner_(std::move(inner)), where_(where), seen_(seen) {}
  Rank rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const Topology& topology() const override { return inner_->topology(); }
  std::string name() const override { return "poor"; }
  Status exchange(const Exchange& exchange, Clock::time_point deadline) override {
    if ((where_ & kRun) != 0) throw std::bad_alloc();
    return inner_->exchange(exchange, deadline);
  }
  Status flush(Clock::time_point deadline) override { return inner_->flush(deadline); }
  void abort(const Error& why) override {
    ++seen_.aborts;
    if ((where_ & kAbort) != 0) throw std::bad_alloc();
    inner_->abort(why);
  }
  WireCount wire_count() const override { return inner_->wire_count(); }

 private:
  std::unique_ptr<Driver> inner_;
  unsigned where_;
  Seen& seen_;
};

class PoorControl final : public Control {
 public:
  PoorControl(const Topology& topology, unsigned where, Seen& seen)
      : topology_(topology), where_(where), seen_(seen) {}
  const Topology& topology() const override { return topology_; }
  void start(Faults faults) override { seen_.tell = std::move(faults); }
  Status fault() const override { return {}; }
  Status await_fault(milliseconds) override { return {}; }
  void begin_job(const std::string&) override { ++seen_.jobs_begun; }
  void begin_exchange(const char*) override {}
  void end_job() override { ++seen_.jobs_ended; }
  void begin_dense(const std::string&) override {}
  void end_dense() override {}
  void report(const Error&) override {
    ++seen_.reports;
    if ((where_ & kReport) != 0) throw std::bad_alloc();
  }
  Status settle(milliseconds) override {
    if ((where_ & kSettle) != 0) throw std::bad_alloc();
    return seen_.truth;
  }
  Rank behind() const override { return Rank{-1}; }
  std::vector<std::string> take_notices() override { return {}; }
  void close_handles_in_child() noexcept override {}

 private:
  Topology topology_;
  unsigned where_;
  Seen& seen_;
};

/// Rank 0 of two; its peer is a driver that does nothing, or `peer`, where it is wanted.
std::unique_ptr<Engine> poor_engine(unsigned where, Seen& seen,
                                    std::unique_ptr<Driver>* peer = nullptr) {
  auto drivers = make_loopback(2);
  auto control = std::make_unique<PoorControl>(drivers[0]->topology(), where, seen);
  auto driver = std::make_unique<PoorDriver>(std::move(drivers[0]), where, seen);
  if (peer != nullptr) *peer = std::move(drivers[1]);
  return make_engine(std::move(driver), options_of(SchemeId::kAgSparse), std::move(control));
}

Case small_job() { return make_case({2, DType::kF32, Storage::kDense, 500, 1, Pattern::kUniform}); }

class Throwing : public ::testing::TestWithParam<unsigned> {};

TEST_P(Throwing, AJobThatFailsEndsWithItsOwnError) {
  Seen seen;
  Case job = small_job();
  auto engine = poor_engine(kRun | GetParam(), seen);
  Jobs jobs = {engine->submit(job_of(job, 0, "a")), engine->submit(job_of(job, 0, "b"))};
  ASSERT_TRUE(wait_all(jobs)) << "a hang";
  for (const auto& done : jobs) {
    ASSERT_FALSE(done->status().ok());
    EXPECT_EQ(done->status().error().kind, ErrorKind::kCapacity);
    EXPECT_EQ(done->status().error().rank.value, 0);
    EXPECT_EQ(done->status().error().tensor, "a");  // of the first error, also for the second job
  }
  EXPECT_FALSE(engine->status().ok());
  EXPECT_EQ(seen.reports, 1);
  EXPECT_EQ(seen.aborts, 1);  // also where the report threw
  EXPECT_EQ(seen.jobs_begun, 1);
  EXPECT_EQ(seen.jobs_ended, 1);  // or notices would say for ever that it is waited for
}

TEST_P(Throwing, AbortAndCloseEndAllTheSame) {
  Seen seen;
  Case job = small_job();
  std::unique_ptr<Driver> peer;
  auto engine = poor_engine(GetParam() & ~kAbort, seen, &peer);  // its abort must end the job here
  Jobs jobs = {engine->submit(job_of(job, 0, "a"))};
  EXPECT_FALSE(jobs[0]->wait_until(Clock::now() + milliseconds(20)));
  engine->close(milliseconds(20));
  ASSERT_TRUE(wait_all(jobs)) << "a hang";
  EXPECT_EQ(jobs[0]->status().error().kind, ErrorKind::kPeerLost);
  EXPECT_GE(seen.aborts, 1);
}

TEST_P(Throwing, AnAbortIsTheErrorOfLaterJobs) {
  Seen seen;
  Case job = small_job();
  auto engine = poor_engine(GetParam(), seen);
  engine->abort(make_error(ErrorKind::kMismatch, "two texts that differ", Rank{1}));
  Jobs jobs = {engine->submit(job_of(job, 0, "a"))};
  ASSERT_TRUE(wait_all(jobs)) << "a hang";
  EXPECT_EQ(jobs[0]->status().error().kind, ErrorKind::kMismatch);
  EXPECT_EQ(seen.aborts, 1);
}

/// A peer has reported a fault, and another rank was first: only `settled` is what all ranks say.
TEST_P(Throwing, SettledIsWhatAllRanksSayAndStaysIt) {
  Seen seen;
  auto engine = poor_engine(GetParam(), seen);
  EXPECT_TRUE(engine->settled().ok());
  seen.tell(make_error(ErrorKind::kMismatch, "a word of one", Rank{1}), false);
  seen.truth = make_error(ErrorKind::kMismatch, "the word of all", Rank{0});
  EXPECT_EQ(engine->status().error().culprit, Rank{1});
  const bool can_settle = (GetParam() & kSettle) == 0;
  EXPECT_EQ(engine->settled().error().culprit, Rank{can_settle ? 0 : 1});
  EXPECT_EQ(engine->status().error().culprit, Rank{can_settle ? 0 : 1});
}

INSTANTIATE_TEST_SUITE_P(Places, Throwing,
                         ::testing::Values(0U, kReport + 0U, kAbort + 0U, kSettle + 0U,
                                           kReport | kAbort | kSettle));

}  // namespace
}  // namespace zensync::test
