// What each fault does to the messages of one rank, over the loopback and the native mesh.
// Place: tests of driver. Rank 1 of a world has the faults; the others are as they are. That
// nothing changes without faults is shown by the contract suite; what schemes make of faults, by
// the matrix in core/engine/test.
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "messages.hpp"
#include "worlds.hpp"

namespace zensync::test {
namespace {

using Inner = std::pair<const char*, Drivers (*)(int)>;

Drivers plain_loopback(int size) { return make_loopback(size); }

class Faulty : public ::testing::TestWithParam<Inner> {
 protected:
  /// Rank 1 gets the faults of `text`.
  void make(int size, const std::string& text) {
    FaultPlan plan = parse_faults(text).value();
    plan.acted = [this](const Fault& fault) { acted_.push_back(fault.kind); };
    make(size, std::move(plan));
  }
  void make(int size, FaultPlan plan) {
    drivers_ = GetParam().second(size);
    drivers_[1] = make_faulty(std::move(drivers_[1]), std::move(plan));
  }
  Driver& driver(int rank) { return *drivers_[static_cast<std::size_t>(rank)]; }

  /// One exchange of rank 1: messages of 100 bytes with these seeds, to rank 0. Its memory is
  /// overwritten as soon as the rules allow it.
  Status send(const std::vector<std::uint64_t>& seeds) {
    for (auto& old : outgoing_[turn_ ^= 1]) std::fill(old.begin(), old.end(), std::byte{0xDD});
    outgoing_[turn_].clear();
    Exchange exchange;
    for (const std::uint64_t seed : seeds) {
      exchange.sends.push_back({Rank{0}, outgoing_[turn_].emplace_back(message_of(seed, 100))});
    }
    return driver(1).exchange(exchange, soon());
  }

  /// What rank 0 gets next.
  Buffer& next() {
    const Status status = driver(0).exchange(waiting_for(1, in_), soon());
    EXPECT_TRUE(status.ok()) << status.error().message;
    return in_;
  }

  Drivers drivers_;
  std::vector<FaultKind> acted_;
  std::deque<std::vector<std::byte>> outgoing_[2];
  int turn_ = 0;
  Buffer in_;
};

TEST_P(Faulty, DelayWaitsBeforeItsExchange) {
  make(2, "delay:exchange=1,ms=60");
  for (int i = 0; i < 3; ++i) {
    const auto start = Clock::now();
    ASSERT_TRUE(send({5}).ok());
    if (i == 1) {
      EXPECT_GE(Clock::now() - start, 60ms);
    }
    EXPECT_TRUE(holds(next(), 5, 100));
  }
  EXPECT_EQ(acted_, std::vector{FaultKind::kDelay});
}

TEST_P(Faulty, DelayEndsAtTheDeadline) {
  make(2, "delay:ms=20000");
  const auto start = Clock::now();
  Buffer in;
  EXPECT_FALSE(driver(1).exchange(waiting_for(0, in), soon(50ms)).ok());
  EXPECT_LT(Clock::now() - start, 3s);
}

TEST_P(Faulty, TruncateCutsTheEnd) {
  make(2, "truncate:exchange=0,bytes=30;truncate:exchange=1,bytes=1000");
  ASSERT_TRUE(send({5}).ok());
  EXPECT_TRUE(holds(next(), 5, 70));
  ASSERT_TRUE(send({6}).ok());
  EXPECT_EQ(next().size(), 0U);
  ASSERT_TRUE(send({7}).ok());
  EXPECT_TRUE(holds(next(), 7, 100));
}

TEST_P(Faulty, CorruptFlipsBitsOfACopy) {
  make(2, "corrupt:exchange=0,offset=40,mask=0x81;corrupt:exchange=1,offset=1000,mask=2");
  for (const std::size_t at : {std::size_t{40}, std::size_t{99}}) {
    ASSERT_TRUE(send({5}).ok());
    auto want = message_of(5, 100);
    EXPECT_EQ(std::memcmp(outgoing_[turn_].front().data(), want.data(), 100), 0);
    want[at] ^= std::byte{at == 40 ? std::uint8_t{0x81} : std::uint8_t{2}};
    EXPECT_EQ(std::memcmp(next().data(), want.data(), 100), 0);
  }
}

TEST_P(Faulty, ACopyLivesAsLongAsItsMessageMayBeUnderWay) {
  make(2, "corrupt:exchange=0,offset=0,mask=1");
  constexpr std::size_t kBytes = 16 << 20;
  auto message = message_of(5, kBytes);
  std::thread receiving([&] {
    std::this_thread::sleep_for(50ms);
    Buffer in;
    ASSERT_TRUE(driver(0).exchange(waiting_for(1, in, kBytes), soon()).ok());
    auto want = message_of(5, kBytes);
    want[0] ^= std::byte{1};
    EXPECT_EQ(std::memcmp(in.data(), want.data(), kBytes), 0);
  });
  Exchange exchange;
  exchange.sends.push_back({Rank{0}, message});
  ASSERT_TRUE(driver(1).exchange(exchange, soon()).ok());
  ASSERT_TRUE(driver(1).exchange(Exchange(), soon()).ok());
  EXPECT_TRUE(driver(1).flush(soon()).ok());
  receiving.join();
}

TEST_P(Faulty, DuplicateSendsTwice) {
  make(2, "duplicate:exchange=0");
  ASSERT_TRUE(send({5}).ok());
  ASSERT_TRUE(send({6}).ok());
  for (const std::uint64_t seed : {5, 5, 6}) EXPECT_TRUE(holds(next(), seed, 100));
}

TEST_P(Faulty, ReorderSwapsTwoOfOneExchange) {
  make(2, "reorder:exchange=0");
  ASSERT_TRUE(send({5, 6, 7}).ok());
  for (const std::uint64_t seed : {6, 5, 7}) EXPECT_TRUE(holds(next(), seed, 100));
}

TEST_P(Faulty, ReorderKeepsOneForTheNextExchange) {
  make(2, "reorder:exchange=0");
  ASSERT_TRUE(send({5}).ok());
  ASSERT_TRUE(send({}).ok());
  ASSERT_TRUE(send({6, 7}).ok());
  ASSERT_TRUE(send({8}).ok());
  for (const std::uint64_t seed : {6, 5, 7, 8}) EXPECT_TRUE(holds(next(), seed, 100));
  EXPECT_EQ(acted_.size(), 1U);
}

TEST_P(Faulty, ReorderInEveryExchangeSwapsPairs) {
  make(2, "reorder");
  for (const std::uint64_t seed : {1, 2, 3, 4}) ASSERT_TRUE(send({seed}).ok());
  for (const std::uint64_t seed : {2, 1, 4, 3}) EXPECT_TRUE(holds(next(), seed, 100));
}

TEST_P(Faulty, ReorderLeavesWithTheFlushAtTheLatest) {
  make(2, "reorder:exchange=0");
  ASSERT_TRUE(send({5}).ok());
  ASSERT_TRUE(driver(1).flush(soon()).ok());
  EXPECT_TRUE(holds(next(), 5, 100));
}

TEST_P(Faulty, DropSendsNothing) {
  make(2, "drop:exchange=0");
  ASSERT_TRUE(send({5}).ok());
  ASSERT_TRUE(send({6}).ok());
  EXPECT_TRUE(holds(next(), 6, 100));
}

TEST_P(Faulty, FaultsOfOnePeerSpareTheOthers) {
  make(3, "drop:peer=2;corrupt:peer=0,mask=1");
  const auto message = message_of(5, 100);
  Exchange exchange;
  exchange.sends.push_back({Rank{0}, message});
  exchange.sends.push_back({Rank{2}, message});
  ASSERT_TRUE(driver(1).exchange(exchange, soon()).ok());
  EXPECT_FALSE(holds(next(), 5, 100));
  Buffer in;
  const Status status = driver(2).exchange(waiting_for(1, in), soon(50ms));
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kDeadline);
}

void expect_own_death(Driver& driver) {
  for (int i = 0; i < 2; ++i) {
    const Status status = i == 0 ? driver.exchange(Exchange(), soon()) : driver.flush(soon());
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().kind, ErrorKind::kPeerLost);
    EXPECT_EQ(status.error().culprit.value, 1);
    EXPECT_EQ(status.error().rank.value, 1);
  }
}

TEST_P(Faulty, DeathBeforeTheSendsIsALostPeer) {
  make(3, "die:exchange=1");
  ASSERT_TRUE(send({5}).ok());
  EXPECT_TRUE(holds(next(), 5, 100));
  ASSERT_FALSE(send({6}).ok());
  expect_own_death(driver(1));
  driver(1).abort(make_error(ErrorKind::kInternal, "the dead say nothing"));
  drivers_[1].reset();
  for (const int rank : {0, 2}) {
    Buffer in;
    const auto start = Clock::now();
    const Status status = driver(rank).exchange(waiting_for(1, in), soon());
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().kind, ErrorKind::kPeerLost) << status.error().message;
    EXPECT_EQ(status.error().culprit.value, 1);
    EXPECT_LT(Clock::now() - start, 3s);
  }
}

TEST_P(Faulty, DeathAfterTheSendsLetsThemArrive) {
  make(2, "die:exchange=0,after=1");
  ASSERT_FALSE(send({5}).ok());
  expect_own_death(driver(1));
  EXPECT_TRUE(holds(next(), 5, 100));
  const Status status = driver(0).exchange(waiting_for(1, in_), soon());
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kPeerLost);
}

TEST_P(Faulty, DeathCallsWhatThePlanSays) {
  int calls = 0;
  FaultPlan plan;
  plan.faults = parse_faults("die:exchange=0").value().faults;
  plan.die = [&calls] { ++calls; };
  make(2, std::move(plan));
  ASSERT_FALSE(send({5}).ok());
  expect_own_death(driver(1));
  EXPECT_EQ(calls, 1);
}

INSTANTIATE_TEST_SUITE_P(Drivers, Faulty,
                         ::testing::Values(Inner{"loopback", plain_loopback},
                                           Inner{"native", make_native}),
                         [](const auto& given) { return std::string(given.param.first); });

TEST(FaultySignal, KillsTheProcess) {
  const pid_t child = ::fork();
  if (child == 0) {
    auto drivers = make_loopback(1);
    FaultPlan plan = parse_faults("die:how=signal").value();
    auto driver = make_faulty(std::move(drivers[0]), std::move(plan));
    (void)driver->exchange(Exchange(), soon());
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
}

/// A driver that knows nothing of vanishing says so.
class Plain final : public Driver {
 public:
  explicit Plain(std::unique_ptr<Driver> inner) : inner_(std::move(inner)) {}
  Rank rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const Topology& topology() const override { return inner_->topology(); }
  std::string name() const override { return "plain"; }
  Status exchange(const Exchange& exchange, Clock::time_point deadline) override {
    return inner_->exchange(exchange, deadline);
  }
  Status flush(Clock::time_point deadline) override { return inner_->flush(deadline); }
  void abort(const Error& why) override { inner_->abort(why); }
  WireCount wire_count() const override { return inner_->wire_count(); }
  void close_handles_in_child() noexcept override { ++closed_in_child; }

  static inline int closed_in_child = 0;

 private:
  std::unique_ptr<Driver> inner_;
};

TEST(Decorators, LetGoOfConnectionsInAForkedChild) {
  auto drivers = make_loopback(1);
  std::unique_ptr<Driver> driver = std::make_unique<Plain>(std::move(drivers[0]));
  driver =
      make_counting(make_tracing(without_faults(std::move(driver)), std::make_shared<Trace>()));
  Plain::closed_in_child = 0;
  driver->close_handles_in_child();
  EXPECT_EQ(Plain::closed_in_child, 1);
}

TEST(FaultyVanish, IsAnErrorWhereADriverCannot) {
  auto drivers = make_loopback(1);
  auto driver =
      make_faulty(std::make_unique<Plain>(std::move(drivers[0])), parse_faults("die").value());
  const Status status = driver->exchange(Exchange(), soon());
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kUnsupported);
}

}  // namespace
}  // namespace zensync::test
