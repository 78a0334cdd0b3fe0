// The contract of Driver when something fails, for every driver: each error has its kind, names its
// culprit, comes in time, and stays.
// Place: tests of driver; good cases are in contract_test.cpp. A driver joins by a line in
// worlds.hpp.
#include <gtest/gtest.h>

#include "messages.hpp"
#include "worlds.hpp"

namespace zensync::test {
namespace {

class Faults : public ::testing::TestWithParam<Kind> {
 protected:
  void make(int size) {
    drivers_ = GetParam().make(size);
    for (auto& driver : drivers_) ASSERT_NE(driver, nullptr);
  }
  std::unique_ptr<Driver>& driver(int rank) { return drivers_[static_cast<std::size_t>(rank)]; }

  Drivers drivers_;
};

const Error kReason{ErrorKind::kMismatch, "shapes differ", Rank{}, Rank{1}, "embedding"};

void expect_reason(const Status& status, int reporter) {
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, kReason.kind) << status.error().message;
  EXPECT_EQ(status.error().message, kReason.message);
  EXPECT_EQ(status.error().culprit, kReason.culprit);
  EXPECT_EQ(status.error().tensor, kReason.tensor);
  EXPECT_EQ(status.error().rank.value, reporter);
}

TEST_P(Faults, AMessageLongerThanExpectedIsNotStored) {
  make(2);
  on_ranks(2, [&](int rank) {
    const auto message = message_of(1, 101);
    Buffer in;
    in.resize_discard(3);
    if (rank == 0) {
      const Status status = driver(0)->exchange(waiting_for(1, in, 100), soon());
      ASSERT_FALSE(status.ok());
      EXPECT_EQ(status.error().kind, ErrorKind::kCorruptMessage);
      EXPECT_EQ(status.error().culprit.value, 1);
      EXPECT_EQ(status.error().rank.value, 0);
      EXPECT_NE(status.error().message.find("rank 1"), std::string::npos);
      EXPECT_EQ(in.size(), 3U);
    } else {
      Exchange exchange;
      exchange.sends.push_back({Rank{0}, message});
      ASSERT_TRUE(driver(1)->exchange(exchange, soon()).ok());
    }
  });
}

TEST_P(Faults, AMessageAsLongAsExpectedIsFine) {
  make(2);
  on_ranks(2, [&](int rank) {
    const auto message = message_of(1, 100);
    Buffer in;
    Exchange exchange = waiting_for(1 - rank, in, 100);
    exchange.sends.push_back({Rank{1 - rank}, message});
    EXPECT_TRUE(driver(rank)->exchange(exchange, soon()).ok());
    EXPECT_TRUE(driver(rank)->flush(soon()).ok());
  });
}

TEST_P(Faults, TheDeadlineNamesWhoDidNotDeliver) {
  make(3);
  const auto message = message_of(1, 10);
  Exchange sending;
  sending.sends.push_back({Rank{0}, message});
  ASSERT_TRUE(driver(1)->exchange(sending, soon()).ok());
  Buffer in[2];
  Exchange exchange = waiting_for(1, in[0]);
  exchange.recvs.push_back({Rank{2}, 100, &in[1]});
  const auto start = Clock::now();
  const Status status = driver(0)->exchange(exchange, start + 150ms);
  const auto elapsed = Clock::now() - start;
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kDeadline);
  EXPECT_EQ(status.error().culprit.value, 2);
  EXPECT_NE(status.error().message.find("rank 2"), std::string::npos) << status.error().message;
  EXPECT_GE(elapsed, 150ms);
  EXPECT_LT(elapsed, 3000ms);
}

TEST_P(Faults, WhatHasArrivedCountsEvenAfterTheDeadline) {
  if (GetParam().is_virtual) GTEST_SKIP() << "see simulated_test.cpp: sleeping delivers nothing";
  make(2);
  const auto message = message_of(1, 10);
  Exchange sending;
  sending.sends.push_back({Rank{0}, message});
  ASSERT_TRUE(driver(1)->exchange(sending, soon()).ok());
  std::this_thread::sleep_for(50ms);
  Buffer in;
  EXPECT_TRUE(driver(0)->exchange(waiting_for(1, in), Clock::now() - 1ms).ok());
}

TEST_P(Faults, ADeadDriverStaysDead) {
  make(2);
  Buffer in;
  const Status first = driver(0)->exchange(waiting_for(1, in), soon(10ms));
  ASSERT_FALSE(first.ok());
  const Status again = driver(0)->exchange(Exchange{}, soon());
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.error().kind, ErrorKind::kDeadline);
  EXPECT_EQ(again.error().message, first.error().message);
  const Status flushed = driver(0)->flush(soon());
  ASSERT_FALSE(flushed.ok());
  EXPECT_EQ(flushed.error().message, first.error().message);
}

TEST_P(Faults, ArgumentsAreChecked) {
  Buffer in;
  for (const int peer : {0, -1, 2}) {
    make(2);
    const Status status = driver(0)->exchange(waiting_for(peer, in), soon(50ms));
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().kind, ErrorKind::kInvalid);
  }
}

TEST_P(Faults, AnAbortReachesEveryRank) {
  make(4);
  on_ranks(4, [&](int rank) {
    Buffer in;
    if (rank == 2) {
      std::this_thread::sleep_for(50ms);
      driver(2)->abort(kReason);
      driver(2)->abort(make_error(ErrorKind::kInternal, "a later reason does not count"));
      expect_reason(driver(2)->exchange(Exchange{}, soon()), 2);
      return;
    }
    // Rank 0 waits for 1, 1 for 3, 3 for 2: only the last waits for the rank that gives up.
    const int from = rank == 0 ? 1 : rank == 1 ? 3 : 2;
    const auto start = Clock::now();
    const Status status = driver(rank)->exchange(waiting_for(from, in), soon());
    expect_reason(status, 2);
    EXPECT_LT(Clock::now() - start, 3s);
    expect_reason(driver(rank)->exchange(Exchange{}, soon()), 2);
  });
}

TEST_P(Faults, AnAbortIsSeenBehindUnreadMessages) {
  make(3);
  on_ranks(3, [&](int rank) {
    Buffer in;
    if (rank == 2) {
      const auto message = message_of(1, 3000);
      Exchange exchange;
      exchange.sends.push_back({Rank{0}, message});
      ASSERT_TRUE(driver(2)->exchange(exchange, soon()).ok());
      driver(2)->abort(kReason);
      driver(2).reset();
    } else {
      if (rank == 1) std::this_thread::sleep_for(300ms);
      expect_reason(driver(rank)->exchange(waiting_for(1 - rank, in), soon()), 2);
    }
  });
}

TEST_P(Faults, AnAbortStuckBehindALargeMessageComesByOthers) {
  make(3);
  on_ranks(3, [&](int rank) {
    Buffer in;
    if (rank == 2) {
      const auto message = message_of(1, 32 << 20);
      Exchange exchange;
      exchange.sends.push_back({Rank{0}, message});
      ASSERT_TRUE(driver(2)->exchange(exchange, soon()).ok());
      driver(2)->abort(kReason);
    } else {
      expect_reason(driver(rank)->exchange(waiting_for(1 - rank, in), soon()), 2);
    }
  });
}

TEST_P(Faults, AnAbortWinsOverTheEndOfItsRank) {
  make(2);
  driver(1)->abort(kReason);
  driver(1).reset();
  const auto message = message_of(1, 4 << 20);
  Buffer in;
  Exchange exchange = waiting_for(1, in);
  exchange.sends.push_back({Rank{1}, message});
  expect_reason(driver(0)->exchange(exchange, soon()), 1);
}

TEST_P(Faults, AnAbortFromAnotherThreadEndsTheExchange) {
  make(2);
  std::thread watchdog([&] {
    std::this_thread::sleep_for(60ms);
    driver(0)->abort(kReason);
  });
  Buffer in;
  const auto start = Clock::now();
  expect_reason(driver(0)->exchange(waiting_for(1, in), soon()), 0);
  EXPECT_LT(Clock::now() - start, 3s);
  watchdog.join();
  expect_reason(driver(1)->exchange(waiting_for(0, in), soon()), 0);
}

TEST_P(Faults, AnAbortReachesARankThatIsSendingALot) {
  make(2);
  on_ranks(2, [&](int rank) {
    const auto message = message_of(1, 32 << 20);
    Buffer in;
    Exchange exchange = waiting_for(1 - rank, in);
    if (rank == 0) {
      exchange.sends.push_back({Rank{1}, message});
      expect_reason(driver(0)->exchange(exchange, soon()), 1);
    } else {
      std::this_thread::sleep_for(50ms);
      driver(1)->abort(kReason);
    }
  });
}

TEST_P(Faults, AFailedRankTellsTheOthersWhenItGoes) {
  make(3);
  on_ranks(3, [&](int rank) {
    Buffer in;
    if (rank == 1) {
      ASSERT_FALSE(driver(1)->exchange(waiting_for(0, in), soon(50ms)).ok());
      driver(1).reset();
    } else {
      const Status status = driver(rank)->exchange(waiting_for(2 - rank, in), soon());
      ASSERT_FALSE(status.ok());
      EXPECT_EQ(status.error().kind, ErrorKind::kDeadline) << status.error().message;
      EXPECT_EQ(status.error().rank.value, 1);
      EXPECT_EQ(status.error().culprit.value, 0);
    }
  });
}

TEST_P(Faults, ARankThatGoesWhileAwaitedIsLost) {
  make(3);
  on_ranks(3, [&](int rank) {
    Buffer in[2];
    if (rank == 2) {
      std::this_thread::sleep_for(50ms);
      driver(2).reset();
      return;
    }
    Exchange exchange = waiting_for(2, in[0]);
    exchange.recvs.push_back({Rank{1 - rank}, 100, &in[1]});
    const auto start = Clock::now();
    const Status status = driver(rank)->exchange(exchange, soon());
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().kind, ErrorKind::kPeerLost) << status.error().message;
    EXPECT_EQ(status.error().culprit.value, 2);
    EXPECT_NE(status.error().message.find("rank 2"), std::string::npos);
    EXPECT_LT(Clock::now() - start, 3s);
    // Kept until the end: a driver that goes would tell the other one, which is another test.
  });
}

TEST_P(Faults, AMessageForNobodyIsNoFault) {
  // What was sent but is never awaited (the other rank failed meanwhile) must not keep anyone.
  make(2);
  const auto message = message_of(1, 16 << 20);
  Exchange exchange;
  exchange.sends.push_back({Rank{1}, message});
  EXPECT_TRUE(driver(0)->exchange(exchange, soon()).ok());
  const auto start = Clock::now();
  driver(0)->abort(kReason);
  driver(0).reset();
  driver(1).reset();
  EXPECT_LT(Clock::now() - start, 3s);
}

INSTANTIATE_TEST_SUITE_P(Drivers, Faults, ::testing::ValuesIn(all_kinds()),
                         name_of_kind<::testing::TestParamInfo<Kind>>);

}  // namespace
}  // namespace zensync::test
