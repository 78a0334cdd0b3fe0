// The contract of Driver when all goes well, for every driver: what arrives, in which order, how
// much. Place: tests of driver; faults are in contract_faults_test.cpp. A driver joins by a line in
// worlds.hpp.
#include <gtest/gtest.h>

#include "messages.hpp"
#include "worlds.hpp"

namespace zensync::test {
namespace {

class ContractSizes : public ::testing::TestWithParam<std::tuple<Kind, int>> {
 protected:
  void SetUp() override {
    size_ = std::get<1>(GetParam());
    drivers_ = std::get<0>(GetParam()).make(size_);
    for (auto& driver : drivers_) ASSERT_NE(driver, nullptr);
  }
  Driver& driver(int rank) { return *drivers_[static_cast<std::size_t>(rank)]; }

  int size_ = 0;
  Drivers drivers_;
};

TEST_P(ContractSizes, KnowsItself) {
  for (int rank = 0; rank < size_; ++rank) {
    EXPECT_EQ(driver(rank).rank().value, rank);
    EXPECT_EQ(driver(rank).size(), size_);
    EXPECT_EQ(driver(rank).topology().size(), size_);
    EXPECT_FALSE(driver(rank).name().empty());
  }
}

TEST_P(ContractSizes, AllToAllOfAllSizes) {
  constexpr int kRounds = 12;
  on_ranks(size_, [&](int rank) {
    Outbox outbox;
    std::vector<Buffer> in(static_cast<std::size_t>(size_));
    WireCount want;
    for (int round = 0; round < kRounds; ++round) {
      outbox.turn();
      Exchange exchange;
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank) continue;
        const auto seed = seed_of(rank, peer, round);
        exchange.sends.push_back(outbox.add(peer, message_of(seed, size_of(seed))));
        exchange.recvs.push_back({Rank{peer}, 1 << 20, &in[static_cast<std::size_t>(peer)]});
        want.sent_bytes += kFramePrefixBytes + size_of(seed);
        want.received_bytes += kFramePrefixBytes + size_of(seed_of(peer, rank, round));
        ++want.sent_messages;
        ++want.received_messages;
      }
      const Status status = driver(rank).exchange(exchange, soon());
      ASSERT_TRUE(status.ok()) << status.error().message;
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank) continue;
        const auto seed = seed_of(peer, rank, round);
        EXPECT_TRUE(holds(in[static_cast<std::size_t>(peer)], seed, size_of(seed)));
      }
    }
    EXPECT_TRUE(driver(rank).flush(soon()).ok());
    const WireCount count = driver(rank).wire_count();
    EXPECT_EQ(count.sent_bytes, want.sent_bytes);
    EXPECT_EQ(count.received_bytes, want.received_bytes);
    EXPECT_EQ(count.sent_messages, want.sent_messages);
    EXPECT_EQ(count.received_messages, want.received_messages);
  });
}

/// A random schedule that all ranks agree on: how many messages go from one rank to another in
/// exchange j, and how many of those are awaited in j + 1 only.
int count_sent(int j, int from, int to) {
  return static_cast<int>(mix(static_cast<std::uint64_t>(j), seed_of(from, to, 7)) % 4);
}

int count_late(int j, int from, int to) {
  const auto choices = static_cast<std::uint64_t>(count_sent(j, from, to)) + 1;
  return static_cast<int>(mix(static_cast<std::uint64_t>(j), seed_of(from, to, 9)) % choices);
}

int count_awaited(int j, int from, int to) {
  const int before = j == 0 ? 0 : count_late(j - 1, from, to);
  return before + count_sent(j, from, to) - count_late(j, from, to);
}

TEST_P(ContractSizes, OrderIsKeptAcrossExchanges) {
  constexpr int kRounds = 20;
  on_ranks(size_, [&](int rank) {
    Outbox outbox;
    std::vector<int> sent(static_cast<std::size_t>(size_));
    std::vector<int> received(static_cast<std::size_t>(size_));
    for (int j = 0; j < kRounds; ++j) {
      outbox.turn();
      Exchange exchange;
      std::deque<Buffer> in;
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank) continue;
        // The last exchange sends nothing: all late ones are awaited in it.
        const bool last = j + 1 == kRounds;
        for (int k = last ? 0 : count_sent(j, rank, peer); k > 0; --k) {
          const auto seed = seed_of(rank, peer, sent[static_cast<std::size_t>(peer)]++);
          exchange.sends.push_back(outbox.add(peer, message_of(seed, size_of(seed))));
        }
        const int here = last ? count_late(j - 1, peer, rank) : count_awaited(j, peer, rank);
        for (int k = 0; k < here; ++k) {
          exchange.recvs.push_back({Rank{peer}, 1 << 20, &in.emplace_back()});
        }
      }
      const Status status = driver(rank).exchange(exchange, soon());
      ASSERT_TRUE(status.ok()) << status.error().message;
      for (const Recv& recv : exchange.recvs) {
        int& number = received[static_cast<std::size_t>(recv.from.value)];
        const auto seed = seed_of(recv.from.value, rank, number++);
        ASSERT_TRUE(holds(*recv.into, seed, size_of(seed)));
      }
    }
  });
}

std::string name_of_sizes(const ::testing::TestParamInfo<std::tuple<Kind, int>>& info) {
  return std::get<0>(info.param).name + "_" + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Drivers, ContractSizes,
                         ::testing::Combine(::testing::ValuesIn(all_kinds()),
                                            ::testing::Values(1, 2, 3, 5, 8)),
                         name_of_sizes);

class Contract : public ::testing::TestWithParam<Kind> {};

TEST_P(Contract, LargeMessagesToAllAtOnceDoNotBlock) {
  constexpr int kSize = 4;
  constexpr std::size_t kBytes = 8 << 20;
  Drivers drivers = GetParam().make(kSize);
  on_ranks(kSize, [&](int rank) {
    Driver& driver = *drivers[static_cast<std::size_t>(rank)];
    Outbox outbox;
    std::vector<Buffer> in(kSize);
    for (int round = 0; round < 2; ++round) {
      outbox.turn();
      Exchange exchange;
      for (int peer = 0; peer < kSize; ++peer) {
        if (peer == rank) continue;
        exchange.sends.push_back(outbox.add(peer, message_of(seed_of(rank, peer, round), kBytes)));
        exchange.recvs.push_back({Rank{peer}, kBytes, &in[static_cast<std::size_t>(peer)]});
      }
      ASSERT_TRUE(driver.exchange(exchange, soon(60s)).ok());
      for (int peer = 0; peer < kSize; ++peer) {
        if (peer == rank) continue;
        EXPECT_TRUE(holds(in[static_cast<std::size_t>(peer)], seed_of(peer, rank, round), kBytes));
      }
    }
    ASSERT_TRUE(driver.flush(soon()).ok());
  });
}

TEST_P(Contract, ALastMessageArrivesAfterItsSenderIsGone) {
  constexpr std::size_t kBytes = 1 << 20;
  Drivers drivers = GetParam().make(2);
  on_ranks(2, [&](int rank) {
    auto& driver = drivers[static_cast<std::size_t>(rank)];
    Buffer in;
    Exchange exchange;
    if (rank == 1) {
      const auto message = message_of(5, kBytes);
      exchange.sends.push_back({Rank{0}, message});
      ASSERT_TRUE(driver->exchange(exchange, soon()).ok());
      ASSERT_TRUE(driver->flush(soon()).ok());
      driver.reset();
    } else {
      std::this_thread::sleep_for(150ms);
      ASSERT_TRUE(driver->exchange(waiting_for(1, in, kBytes), soon()).ok());
      EXPECT_TRUE(holds(in, 5, kBytes));
    }
  });
}

TEST_P(Contract, ARankThatIsDoneMayGoWhileOthersWait) {
  Drivers drivers = GetParam().make(3);
  on_ranks(3, [&](int rank) {
    auto& driver = drivers[static_cast<std::size_t>(rank)];
    const auto message = message_of(1, 100);
    Buffer in;
    Exchange exchange;
    if (rank == 0) {
      ASSERT_TRUE(driver->exchange(waiting_for(1, in), soon()).ok());
    } else if (rank == 1) {
      std::this_thread::sleep_for(200ms);
      exchange.sends.push_back({Rank{0}, message});
      ASSERT_TRUE(driver->exchange(exchange, soon()).ok());
      ASSERT_TRUE(driver->flush(soon()).ok());
    } else {
      driver.reset();
    }
  });
}

TEST_P(Contract, ALastMessageWaitsForItsRecvWhileOthersAreAwaited) {
  Drivers drivers = GetParam().make(3);
  on_ranks(3, [&](int rank) {
    auto& driver = drivers[static_cast<std::size_t>(rank)];
    const auto message = message_of(6, 100);
    Buffer in;
    if (rank == 0) {
      ASSERT_TRUE(driver->exchange(waiting_for(1, in), soon()).ok());
      ASSERT_TRUE(driver->exchange(waiting_for(2, in), soon()).ok());
      EXPECT_TRUE(holds(in, 6, 100));
      return;
    }
    if (rank == 1) std::this_thread::sleep_for(150ms);  // by then rank 2 is gone
    Exchange exchange;
    exchange.sends.push_back({Rank{0}, message});
    ASSERT_TRUE(driver->exchange(exchange, soon()).ok());
    ASSERT_TRUE(driver->flush(soon()).ok());
    driver.reset();
  });
}

TEST_P(Contract, BuffersKeepTheirMemory) {
  Drivers drivers = GetParam().make(2);
  on_ranks(2, [&](int rank) {
    Driver& driver = *drivers[static_cast<std::size_t>(rank)];
    Buffer in;
    const std::byte* memory = nullptr;
    for (const std::size_t size_bytes : {5000, 0, 4999, 17}) {
      const auto message = message_of(3, size_bytes);
      Exchange exchange = waiting_for(1 - rank, in);
      exchange.sends.push_back({Rank{1 - rank}, message});
      ASSERT_TRUE(driver.exchange(exchange, soon()).ok());
      ASSERT_TRUE(driver.flush(soon()).ok());
      EXPECT_TRUE(holds(in, 3, size_bytes));
      if (memory == nullptr) memory = in.data();
      EXPECT_EQ(in.data(), memory);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Drivers, Contract, ::testing::ValuesIn(all_kinds()),
                         name_of_kind<::testing::TestParamInfo<Kind>>);

}  // namespace
}  // namespace zensync::test
