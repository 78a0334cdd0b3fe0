// Faults of the simulated network: links that are down, ranks that vanish, silent hosts, deadlines
// that pass without waiting. Place: tests of driver. Each test is bounded in real time: virtual
// hours take milliseconds.
#include <gtest/gtest.h>

#include "messages.hpp"
#include "worlds.hpp"

namespace zensync::test {
namespace {

using ns = VirtualTime;

SimulatedOptions round_numbers() {
  SimulatedOptions options;
  options.latency = ns(100);
  options.bytes_per_second = 1e9;
  return options;
}

constexpr auto kHour = std::chrono::hours(1);

/// Every rank sends 1000 wire bytes to every other and waits for as much, `rounds` times, with a
/// deadline of one hour for all of it. The status of each rank's last exchange. A rank that fails
/// tells the others if `tells`.
std::vector<Status> all_to_all(Simulation& world, int rounds, bool tells = true) {
  const auto start = Clock::now();
  const auto size = static_cast<int>(world.drivers.size());
  const auto message = message_of(1, 1000 - kFramePrefixBytes);
  std::vector<Status> last(world.drivers.size());
  on_ranks(size, [&](int rank) {
    Driver& driver = *world.drivers[static_cast<std::size_t>(rank)];
    Status& status = last[static_cast<std::size_t>(rank)];
    for (int round = 0; round < rounds && status.ok(); ++round) {
      std::deque<Buffer> in;
      Exchange exchange;
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        exchange.sends.push_back({Rank{peer}, message});
        exchange.recvs.push_back({Rank{peer}, 1 << 20, &in.emplace_back()});
      }
      status = driver.exchange(exchange, start + kHour);
    }
    if (!status.ok() && tells) driver.abort(status.error());
  });
  EXPECT_LT(Clock::now() - start, 10s);
  return last;
}

TEST(SimulatedFaults, NoneIsTheControl) {
  Simulation world = make_simulated(3, round_numbers());
  for (const Status& status : all_to_all(world, 2)) EXPECT_TRUE(status.ok());
  // To rank 2 both others send last, so it is behind, and rank 1 waits for its second message.
  EXPECT_EQ(world.network->now(Rank{0}), ns(4200));
  EXPECT_EQ(world.network->now(Rank{1}), ns(5200));
}

TEST(SimulatedFaults, ALinkThatIsDownDelays) {
  SimulatedOptions options = round_numbers();
  options.links_down = {{2, ns(1500), ns(50'000)}, {2, ns(40'000), ns(60'000)}};
  Simulation world = make_simulated(3, options);
  for (const Status& status : all_to_all(world, 2)) EXPECT_TRUE(status.ok());
  for (int rank = 0; rank < 3; ++rank) EXPECT_GT(world.network->now(Rank{rank}), ns(60'000));
}

TEST(SimulatedFaults, AVirtualDeathIsALostPeer) {
  for (const std::int64_t at : {0, 1, 999, 1000, 1999, 2000, 2100, 2101, 3500, 4200}) {
    SimulatedOptions options = round_numbers();
    options.deaths = {{Rank{1}, ns(at)}};
    Simulation world = make_simulated(3, options);
    const auto statuses = all_to_all(world, 3);
    for (const Status& status : statuses) {
      ASSERT_FALSE(status.ok()) << at;
      EXPECT_EQ(status.error().kind, ErrorKind::kPeerLost) << status.error().message;
      EXPECT_EQ(status.error().culprit.value, 1) << at;
    }
    EXPECT_EQ(world.network->now(Rank{1}), ns(at));
  }
}

TEST(SimulatedFaults, ARankThatDiesAfterItsLastExchangeHurtsNobody) {
  SimulatedOptions options = round_numbers();
  options.deaths = {{Rank{1}, ns(5201)}};
  Simulation world = make_simulated(3, options);
  for (const Status& status : all_to_all(world, 2)) EXPECT_TRUE(status.ok());
}

TEST(SimulatedFaults, ASilentHostEndsAtTheDeadline) {
  for (const std::int64_t at : {0, 1500, 3000}) {
    SimulatedOptions options = round_numbers();
    options.silent_hosts = {{1, ns(at)}};
    Simulation world = make_simulated(3, options);
    for (const Status& status : all_to_all(world, 5)) {
      ASSERT_FALSE(status.ok());
      EXPECT_EQ(status.error().kind, ErrorKind::kDeadline) << status.error().message;
    }
    ns latest{0};
    for (int rank = 0; rank < 3; ++rank) latest = std::max(latest, world.network->now(Rank{rank}));
    EXPECT_GE(latest, kHour - 1s);  // real time passed before the call
    EXPECT_LE(latest, kHour + 1ms);
  }
}

TEST(SimulatedFaults, AllWaitForEachOther) {
  Simulation world = make_simulated(4, round_numbers());
  const auto start = Clock::now();
  on_ranks(4, [&](int rank) {
    // Rank 2 has the earliest deadline; it names whom it waits for, and tells the others.
    auto& driver = world.drivers[static_cast<std::size_t>(rank)];
    Buffer in;
    const auto patience = rank == 2 ? kHour : 2 * kHour;
    const Status status = driver->exchange(waiting_for((rank + 1) % 4, in), start + patience);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().kind, ErrorKind::kDeadline);
    EXPECT_EQ(status.error().rank.value, 2);
    EXPECT_EQ(status.error().culprit.value, 3);
    driver.reset();
  });
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST(SimulatedFaults, AFlushHasADeadlineToo) {
  SimulatedOptions options = round_numbers();
  options.bytes_per_second = 1;
  Simulation world = make_simulated(2, options);
  const auto message = message_of(1, 100'000);
  Exchange exchange;
  exchange.sends.push_back({Rank{1}, message});
  ASSERT_TRUE(world.drivers[0]->exchange(exchange, soon(kHour)).ok());
  const Status status = world.drivers[0]->flush(soon(kHour));
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kDeadline);
}

TEST(SimulatedFaults, VanishingIsSeenByAll) {
  Simulation world = make_simulated(3, round_numbers());
  ASSERT_TRUE(world.drivers[1]->vanish());
  world.drivers[1]->abort(make_error(ErrorKind::kInternal, "the dead say nothing"));
  for (const int rank : {0, 2}) {
    Buffer in;
    const Status status =
        world.drivers[static_cast<std::size_t>(rank)]->exchange(waiting_for(1, in), soon());
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().kind, ErrorKind::kPeerLost);
    EXPECT_EQ(status.error().culprit.value, 1);
  }
}

}  // namespace
}  // namespace zensync::test
