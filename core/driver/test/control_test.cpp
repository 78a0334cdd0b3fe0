// Control connections among honest ranks: all name one fault, a goodbye is none unless a job needs
// that rank, notices, and a Rendezvous that is of no use. Place: tests of driver. Ranks are threads
// that meet through files.
#include <latch>
#include <stdexcept>

#include "control_worlds.hpp"

namespace zensync::test {
namespace {

const Error kReason{ErrorKind::kCapacity, "no memory", Rank{}, Rank{0}, "table"};

/// Long enough for what must not happen to show, were it to happen.
void wait_a_moment() { std::this_thread::sleep_for(120ms); }

class ControlTest : public ::testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }
};

TEST_P(ControlTest, WithoutFaultsNobodyIsToldAnything) {
  ControlWorld world(size());
  for (int rank = 0; rank < size(); ++rank) start_job(world.at(rank), "table");
  wait_a_moment();
  EXPECT_TRUE(world.is_quiet());
  for (int rank = 0; rank < size(); ++rank) {
    EXPECT_TRUE(world.at(rank).settle(1s).ok());
    EXPECT_EQ(world.at(rank).behind().value, -1);
    EXPECT_TRUE(world.at(rank).take_notices().empty());
    EXPECT_EQ(world.at(rank).topology().size(), size());
  }
}

TEST_P(ControlTest, AReportReachesAllRanks) {
  ControlWorld world(size());
  const int last = size() - 1;
  const auto start = Clock::now();
  world.at(last).report(kReason);
  const auto fault = world.common_fault();
  EXPECT_LT(Clock::now() - start, 1s);
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->kind, kReason.kind);
  EXPECT_EQ(fault->message, kReason.message);
  EXPECT_EQ(fault->culprit.value, 0);
  EXPECT_EQ(fault->tensor, "table");
  EXPECT_EQ(fault->rank.value, last);  // who saw it
}

TEST_P(ControlTest, TheFirstReportCounts) {
  ControlWorld world(size());
  world.at(0).report(kReason);
  world.at(0).report(make_error(ErrorKind::kInternal, "later"));
  const auto fault = world.common_fault();
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->message, kReason.message);
}

/// Ranks 0 and n − 1 report different faults at the same instant.
void report_two(ControlWorld& world) {
  std::latch together(2);
  const auto report = [&](int rank) {
    together.arrive_and_wait();
    world.at(rank).report(make_error(rank == 0 ? ErrorKind::kMismatch : ErrorKind::kCorruptMessage,
                                     "as rank " + std::to_string(rank) + " sees it", Rank{rank}));
  };
  std::thread other(report, world.size() - 1);
  report(0);
  other.join();
}

TEST_P(ControlTest, OfTwoFaultsAtOnceAllRanksNameTheSame) {
  for (int round = 0; round < 50; ++round) {
    ControlWorld world(size());
    report_two(world);
    const auto fault = world.common_fault();
    ASSERT_TRUE(fault.has_value()) << round;
    ASSERT_EQ(fault->culprit, fault->rank);
    ASSERT_EQ(fault->kind, fault->rank.value == 0 ? ErrorKind::kMismatch  // never a mixture
                                                  : ErrorKind::kCorruptMessage);
    ASSERT_FALSE(HasFailure()) << round;
  }
}

TEST_P(ControlTest, AGoodbyeIsNoFault) {
  ControlWorld world(size());
  for (int rank = 0; rank < size(); ++rank) {
    start_job(world.at(rank), "table");
    world.at(rank).end_job();
  }
  for (int rank = 1; rank < size(); ++rank) EXPECT_LT(world.close(rank), 1s);
  wait_a_moment();
  EXPECT_TRUE(world.is_quiet());
}

TEST_P(ControlTest, AGoodbyeIsNoFaultForAJobThatTheRankHadDone) {
  ControlWorld world(size());
  for (int rank = 0; rank < size(); ++rank) start_job(world.at(rank), "table");
  for (int rank = 1; rank < size(); ++rank) world.at(rank).end_job();
  for (int rank = 1; rank < size(); ++rank) world.close(rank);
  world.at(0).begin_exchange("pull");  // still in that job
  wait_a_moment();
  EXPECT_TRUE(world.is_quiet());
}

TEST_P(ControlTest, AGoodbyeInTheMiddleOfAJobIsAFault) {
  ControlWorld world(size());
  start_job(world.at(0), "table");
  world.close(size() - 1);
  const auto fault = world.ear(0).truth();
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->kind, ErrorKind::kPeerLost);
  EXPECT_EQ(fault->culprit.value, size() - 1);
  EXPECT_EQ(fault->tensor, "table");
}

TEST_P(ControlTest, AJobAfterAGoodbyeIsAFaultAtOnce) {
  ControlWorld world(size());
  world.close(size() - 1);
  wait_a_moment();
  EXPECT_TRUE(world.is_quiet());
  const auto start = Clock::now();
  start_job(world.at(0), "late");
  const auto fault = world.ear(0).truth();
  EXPECT_LT(Clock::now() - start, 1s);
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->culprit.value, size() - 1);
  EXPECT_EQ(fault->tensor, "late");
}

INSTANTIATE_TEST_SUITE_P(Sizes, ControlTest, ::testing::Values(2, 3, 5));

TEST(ControlEnds, AReportIsNotLostWhenItsRankEndsAtOnce) {
  for (int round = 0; round < 20; ++round) {
    ControlWorld world(2);
    world.at(0).report(kReason);
    world.close(0);
    const auto fault = world.ear(1).truth();
    ASSERT_TRUE(fault.has_value()) << round;
    EXPECT_EQ(fault->message, kReason.message);
  }
}

TEST(ControlEnds, ARankThatNeverStartedEnds) {
  const TemporaryFolder folder;
  on_ranks(2, [&](int rank) {
    auto opened = open_control(control_options(rank, 2), make_file_rendezvous(folder.path()));
    ASSERT_TRUE(opened.ok());
    opened.value()->report(kReason);
    const auto start = Clock::now();
    opened.value().reset();
    EXPECT_LT(Clock::now() - start, 1s);
  });
}

/// Two ranks whose control connections stand and were not started; rank 1 gives up.
struct Unstarted {
  Unstarted() {
    on_ranks(2, [&](int rank) {
      auto opened = open_control(control_options(rank, 2), make_file_rendezvous(folder.path()));
      ASSERT_TRUE(opened.ok());
      controls[static_cast<std::size_t>(rank)] = std::move(opened.value());
    });
  }
  TemporaryFolder folder;
  std::array<std::unique_ptr<Control>, 2> controls;
};

TEST(ControlBeforeItsStart, KnowsFaultsAndTellsThemAtTheStart) {
  Unstarted ranks;
  Control& control = *ranks.controls[0];
  EXPECT_TRUE(control.fault().ok());
  ranks.controls[1]->report(kReason);
  const auto limit = Clock::now() + kEnough;
  while (control.fault().ok() && Clock::now() < limit) std::this_thread::sleep_for(1ms);
  ASSERT_FALSE(control.fault().ok());
  EXPECT_EQ(control.fault().error().message, kReason.message);
  Ear ear;
  control.start(ear.listener());
  const auto truth = ear.truth();
  ASSERT_TRUE(truth.has_value());
  EXPECT_EQ(truth->message, kReason.message);
  ranks.controls[0].reset();
}

TEST(ControlBeforeItsStart, EndsWaitsInAWatchedRendezvous) {
  Unstarted ranks;
  auto files = make_file_rendezvous(ranks.folder.path());
  const auto watched = make_watched_rendezvous(*files, *ranks.controls[0]);
  EXPECT_TRUE(watched->check().ok());
  const auto absent = watched->wait("never", 250ms);
  ASSERT_FALSE(absent.ok());
  EXPECT_EQ(absent.error().kind, ErrorKind::kDeadline);
  ASSERT_TRUE(watched->set("there", "1").ok());
  EXPECT_EQ(watched->wait("there", 0ms).value(), "1");
  std::thread failing([&] {
    wait_a_moment();
    ranks.controls[1]->report(kReason);
  });
  const auto start = Clock::now();
  const auto ended = watched->wait("never", 60s);
  failing.join();
  EXPECT_LT(Clock::now() - start, kEnough);
  ASSERT_FALSE(ended.ok());
  EXPECT_EQ(ended.error().message, kReason.message);
  EXPECT_EQ(watched->check().error().message, kReason.message);
}

/// The fault that rank 0 of `world` settles on after its report, and how long that took.
Status settle_after_report(ControlWorld& world, milliseconds limit, Clock::duration& took) {
  const auto start = Clock::now();
  world.at(0).report(kReason);
  Status settled = world.at(0).settle(limit);
  took = Clock::now() - start;
  return settled;
}

TEST(ControlRendezvous, ThatFailsLeavesTheFaultThatIsKnown) {
  const OddRendezvous::Instead ways[] = {
      [] { return make_error(ErrorKind::kUnsupported, "the store is gone"); },
      []() -> Result<std::string> { throw std::runtime_error("the store is gone"); },
      [] { return std::string(); }, [] { return std::string(30, 'x'); }};
  for (const auto& way : ways) {
    ControlWorld world(3, odd_plan(way));
    Clock::duration took{};
    const Status settled = settle_after_report(world, kEnough, took);
    ASSERT_FALSE(settled.ok());
    EXPECT_EQ(settled.error().message, kReason.message);
    EXPECT_LT(took, 1s);
    const auto fault = world.common_fault();  // the control connections do it alone
    ASSERT_TRUE(fault.has_value());
    EXPECT_EQ(fault->message, kReason.message);
  }
}

/// Control: it is the Rendezvous that makes the difference between two faults at once.
TEST(ControlRendezvous, WithoutOneTwoFaultsAtOnceMayDiffer) {
  int differ = 0;
  for (int round = 0; round < 50 && differ == 0; ++round) {
    ControlWorld world(2, odd_plan([] { return make_error(ErrorKind::kUnsupported, "gone"); }));
    report_two(world);
    const auto first = world.ear(0).truth();
    const auto second = world.ear(1).truth();
    ASSERT_TRUE(first.has_value() && second.has_value());
    differ += ControlWorld::same_error(*first, *second) ? 0 : 1;
  }
  EXPECT_EQ(differ, 1);
}

TEST(ControlRendezvous, ThatBlocksForEverHoldsNobodyUp) {
  const auto gate = std::make_shared<Gate>();
  std::atomic<int> inside{0};
  const auto blocks = [gate, &inside]() -> Result<std::string> {
    ++inside;
    gate->pass();
    --inside;
    return std::string();
  };
  {
    ControlWorld world(2, odd_plan(blocks));
    Clock::duration took{};
    const auto start = Clock::now();
    const Status settled = settle_after_report(world, 200ms, took);
    ASSERT_FALSE(settled.ok());
    EXPECT_EQ(settled.error().message, kReason.message);
    EXPECT_GE(took, 200ms);
    EXPECT_LT(took, 1s);
    EXPECT_GT(inside, 0);
    // A queue of jobs ends at once: only the first of them waits.
    for (int job = 0; job < 10; ++job) EXPECT_FALSE(world.at(0).settle(200ms).ok());
    EXPECT_LT(Clock::now() - start, 1s);
    // The other rank is told at once, if not for good.
    while (!world.ear(1).heard()) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(world.at(1).settle(0ms).error().message, kReason.message);
    EXPECT_FALSE(world.ear(1).truth(0ms).has_value());
    for (int rank = 0; rank < 2; ++rank) EXPECT_LT(world.close(rank), 1s);
  }
  gate->open();
  const auto until = soon(kEnough);
  while (inside != 0 && Clock::now() < until) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(inside, 0);
}

/// Its call may be into an interpreter, which ends once all States have.
TEST(ControlRendezvous, ThatIsSlowHasAnsweredWhenItsRankEnds) {
  std::atomic<int> begun{0};
  std::atomic<int> inside{0};
  const auto slow = [&]() -> Result<std::string> {
    ++inside;
    ++begun;
    std::this_thread::sleep_for(100ms);
    --inside;
    return std::string();
  };
  ControlWorld world(2, odd_plan(slow));
  world.at(0).report(kReason);
  while (begun == 0) std::this_thread::sleep_for(1ms);
  EXPECT_GT(inside, 0);
  for (int rank = 0; rank < 2; ++rank) world.close(rank);
  EXPECT_EQ(inside, 0);
}

/// Where ranks cannot connect to each other, the Rendezvous alone says what the fault is.
TEST(ControlWithoutConnections, RanksAgreeOnceEachHasAFaultOfItsOwn) {
  ControlPlan plan;
  plan.change = [](ControlOptions& options) {
    shorten(options);
    options.has_connections = false;
  };
  ControlWorld world(3, plan);
  EXPECT_EQ(world.at(1).topology().size(), 3);
  start_job(world.at(0), "table");
  std::this_thread::sleep_for(500ms);
  EXPECT_TRUE(world.is_quiet());  // silence tells nothing here
  const std::vector<std::string> notices = world.at(0).take_notices();
  ASSERT_FALSE(notices.empty());
  for (const std::string& text : notices) {
    EXPECT_NE(text.find("there are no heartbeats"), std::string::npos) << text;
  }
  EXPECT_EQ(world.at(0).behind().value, -1);
  world.at(2).report(kReason);
  EXPECT_EQ(world.at(2).settle(kEnough).error().message, kReason.message);
  EXPECT_TRUE(world.at(0).settle(0ms).ok());  // nobody is told
  for (const int rank : {0, 1}) world.at(rank).report(make_error(ErrorKind::kDeadline, "late"));
  const auto fault = world.common_fault();
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->message, kReason.message);
  EXPECT_EQ(fault->rank.value, 2);
  for (int rank = 0; rank < 3; ++rank) EXPECT_LT(world.close(rank), 1s);
}

ControlPlan short_plan() {
  ControlPlan plan;
  plan.change = [](ControlOptions& options) { options.warn_after = 100ms; };
  return plan;
}

/// The notices of a rank, waited for until there is one.
std::string next_notice(Control& control) {
  const auto until = soon(kEnough);
  while (Clock::now() < until) {
    const auto notices = control.take_notices();
    if (!notices.empty()) return notices.front();
    std::this_thread::sleep_for(5ms);
  }
  return "no notice in time";
}

TEST(ControlNotices, NameWhoIsWaitedFor) {
  ControlWorld world(3, short_plan());
  const auto start = Clock::now();
  start_job(world.at(0), "table", "gather");
  start_job(world.at(2), "table", "gather");
  const std::string notice = next_notice(world.at(0));
  EXPECT_GE(Clock::now() - start, 60ms);  // 100 ms, less what the first tick counts too much
  EXPECT_NE(notice.find("waiting in 'gather' of tensor 'table' (job 1) for"), std::string::npos)
      << notice;
  EXPECT_NE(notice.find("rank 1 has not come to it, its process lives"), std::string::npos)
      << notice;
  EXPECT_EQ(notice.find("rank 2"), std::string::npos) << notice;
  EXPECT_EQ(world.at(0).behind().value, 1);
  start_job(world.at(1), "table", "gather");
  world.at(0).end_job();
  std::string over = next_notice(world.at(0));  // other warnings may have come in between
  while (over.find("for") != std::string::npos) over = next_notice(world.at(0));
  EXPECT_NE(over.find("is over after"), std::string::npos) << over;
  EXPECT_TRUE(world.at(1).take_notices().empty());
  EXPECT_TRUE(world.is_quiet());
}

TEST(ControlNotices, OfDenseAllReduces) {
  ControlWorld world(2, short_plan());
  world.at(0).begin_dense("bias");
  EXPECT_NE(next_notice(world.at(0)).find("the dense all-reduce of tensor 'bias'"),
            std::string::npos);
  EXPECT_EQ(world.at(0).behind().value, 1);
  world.at(1).begin_dense("bias");
  const auto until = soon(kEnough);
  while (world.at(0).behind().value >= 0 && Clock::now() < until) std::this_thread::sleep_for(5ms);
  EXPECT_EQ(world.at(0).behind().value, -1);
  world.at(0).end_dense();
  EXPECT_TRUE(world.is_quiet());
}

}  // namespace
}  // namespace zensync::test
