// Times of the simulated network: they follow its model to the nanosecond, and do not depend on
// threads. Place: tests of driver; its faults are in simulated_faults_test.cpp, the contract of
// every driver in contract_test.cpp.
#include <gtest/gtest.h>

#include "messages.hpp"
#include "worlds.hpp"

namespace zensync::test {
namespace {

using ns = VirtualTime;

/// 1 byte per ns, 100 ns on the way, 10 within a host.
SimulatedOptions round_numbers() {
  SimulatedOptions options;
  options.latency = ns(100);
  options.local_latency = ns(10);
  options.bytes_per_second = 1e9;
  return options;
}

constexpr std::size_t kBytes = 1000 - kFramePrefixBytes;  // 1000 on the wire

/// One exchange of `rank`: a message of 1000 wire bytes to each of `to`, one from each of `from`.
Status exchange(Simulation& world, int rank, const std::vector<int>& to,
                const std::vector<int>& from, Clock::time_point deadline = soon()) {
  static const auto message = message_of(1, kBytes);
  std::deque<Buffer> in;
  Exchange exchange;
  for (const int peer : to) exchange.sends.push_back({Rank{peer}, message});
  for (const int peer : from) {
    exchange.recvs.push_back({Rank{peer}, 1 << 20, &in.emplace_back()});
  }
  return world.drivers[static_cast<std::size_t>(rank)]->exchange(exchange, deadline);
}

TEST(Simulated, AMessageTakesItsBytesAndTheLatency) {
  Simulation world = make_simulated(2, round_numbers());
  ASSERT_TRUE(exchange(world, 0, {1}, {}).ok());
  EXPECT_EQ(world.network->now(Rank{0}), ns(0));  // sending does not wait
  ASSERT_TRUE(exchange(world, 1, {}, {0}).ok());
  EXPECT_EQ(world.network->now(Rank{1}), ns(1100));
  ASSERT_TRUE(world.drivers[0]->flush(soon()).ok());
  EXPECT_EQ(world.network->now(Rank{0}), ns(1000));  // a flush does
}

TEST(Simulated, AnExchangeWaitsForTheSendsOfTheOneBefore) {
  Simulation world = make_simulated(2, round_numbers());
  ASSERT_TRUE(exchange(world, 0, {1}, {}).ok());
  ASSERT_TRUE(exchange(world, 0, {1}, {}).ok());
  EXPECT_EQ(world.network->now(Rank{0}), ns(1000));
}

TEST(Simulated, MessagesOfASenderLeaveOneAfterAnother) {
  Simulation world = make_simulated(3, round_numbers());
  ASSERT_TRUE(exchange(world, 0, {1, 2}, {}).ok());
  ASSERT_TRUE(exchange(world, 1, {}, {0}).ok());
  ASSERT_TRUE(exchange(world, 2, {}, {0}).ok());
  EXPECT_EQ(world.network->now(Rank{1}), ns(1100));
  EXPECT_EQ(world.network->now(Rank{2}), ns(2100));
}

TEST(Simulated, TheReceiversCardIsTakenOnceAtATime) {
  Simulation world = make_simulated(3, round_numbers());
  ASSERT_TRUE(exchange(world, 1, {0}, {}).ok());
  ASSERT_TRUE(exchange(world, 2, {0}, {}).ok());
  ASSERT_TRUE(exchange(world, 0, {}, {1, 2}).ok());
  EXPECT_EQ(world.network->now(Rank{0}), ns(2100));
}

TEST(Simulated, RanksOfAHostShareItsCardAndUseNoneAmongThemselves) {
  SimulatedOptions options = round_numbers();
  options.topology.places = {{0, 0}, {0, 1}, {1, 0}};
  Simulation world = make_simulated(3, options);
  ASSERT_TRUE(exchange(world, 0, {1, 2}, {}).ok());
  ASSERT_TRUE(exchange(world, 1, {}, {0}).ok());
  ASSERT_TRUE(exchange(world, 2, {}, {0}).ok());
  EXPECT_EQ(world.network->now(Rank{1}), ns(10));
  EXPECT_EQ(world.network->now(Rank{2}), ns(2100));  // half of a card out
  EXPECT_EQ(world.drivers[0]->topology().places[2].host, 1);
}

TEST(Simulated, ComputingMovesAClock) {
  Simulation world = make_simulated(2, round_numbers());
  world.network->spend(Rank{0}, ns(500));
  world.network->spend(Rank{1}, ns(5000));
  ASSERT_TRUE(exchange(world, 0, {1}, {}).ok());
  ASSERT_TRUE(exchange(world, 1, {0}, {0}).ok());
  EXPECT_EQ(world.network->now(Rank{1}), ns(5000));  // it was there at 1600
  ASSERT_TRUE(exchange(world, 0, {}, {1}).ok());
  EXPECT_EQ(world.network->now(Rank{0}), ns(6100));
}

TEST(Simulated, WhatHasArrivedCountsEvenAfterTheDeadline) {
  Simulation world = make_simulated(2, round_numbers());
  ASSERT_TRUE(exchange(world, 0, {1}, {}).ok());
  world.network->spend(Rank{1}, ns(1100));
  EXPECT_TRUE(exchange(world, 1, {}, {0}, Clock::now() - 1ms).ok());
}

TEST(Simulated, WhatArrivesAfterTheDeadlineIsLate) {
  Simulation world = make_simulated(2, round_numbers());
  ASSERT_TRUE(exchange(world, 0, {1}, {}).ok());
  const auto deadline = Clock::now() - 1ms;  // no time left: at 1099 the message is not there
  world.network->spend(Rank{1}, ns(1099));
  const Status status = exchange(world, 1, {}, {0}, deadline);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kDeadline);
  EXPECT_EQ(status.error().culprit.value, 0);
}

/// Runs a random schedule on threads of random speed; the clocks at the end.
std::vector<ns> clocks_of_a_run(std::uint64_t seed, std::uint64_t pace) {
  constexpr int kSize = 5;
  SimulatedOptions options = round_numbers();
  options.jitter = ns(300);
  options.seed = seed;
  options.topology.places = {{0, 0}, {0, 1}, {1, 0}, {1, 1}, {2, 0}};
  options.links_down = {{1, ns(3000), ns(9000)}};
  Simulation world = make_simulated(kSize, options);
  on_ranks(kSize, [&](int rank) {
    for (int round = 0; round < 15; ++round) {
      Outbox outbox;
      std::deque<Buffer> in;
      Exchange exchange;
      for (int peer = 0; peer < kSize; ++peer) {
        if (peer == rank) continue;
        const std::size_t bytes = seed_of(rank, peer, round) % 2000;
        exchange.sends.push_back(outbox.add(peer, message_of(1, bytes)));
        if (round > 0) exchange.recvs.push_back({Rank{peer}, 1 << 20, &in.emplace_back()});
      }
      const std::uint64_t hash = mix(pace, static_cast<std::uint64_t>(rank * 100 + round));
      if (hash % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(hash % 400));
      world.network->spend(Rank{rank}, ns(rank * 10 + round));
      ASSERT_TRUE(world.drivers[static_cast<std::size_t>(rank)]->exchange(exchange, soon()).ok());
    }
  });
  std::vector<ns> clocks;
  for (int rank = 0; rank < kSize; ++rank) clocks.push_back(world.network->now(Rank{rank}));
  return clocks;
}

TEST(Simulated, TimesDoNotDependOnThreads) {
  const auto first = clocks_of_a_run(7, 0);
  for (std::uint64_t pace = 1; pace < 12; ++pace) EXPECT_EQ(clocks_of_a_run(7, pace), first);
  EXPECT_NE(clocks_of_a_run(8, 0), first);  // control: the seed matters
}

}  // namespace
}  // namespace zensync::test
