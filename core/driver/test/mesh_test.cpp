// The native mesh beyond the contract: start-up among strangers, disagreement, absence, topology,
// flush. Place: tests of driver. Ranks are threads that meet through files; strangers are plain
// sockets.
#include <gtest/gtest.h>

#include <future>
#include <optional>

#include "messages.hpp"
#include "strangers.hpp"
#include "wire.hpp"
#include "worlds.hpp"

namespace zensync::test {
namespace {

using Opened = std::vector<std::optional<Result<std::unique_ptr<Driver>>>>;

class MeshTest : public ::testing::Test {
 protected:
  /// Opens the mesh on all ranks; `change` may alter each rank's options.
  Opened open(int size, const std::function<void(NativeMeshOptions&)>& change) {
    Opened opened(static_cast<std::size_t>(size));
    on_ranks(size, [&](int rank) {
      auto options = mesh_options(rank, size);
      change(options);
      auto rendezvous = make_file_rendezvous(folder_.path());
      opened[static_cast<std::size_t>(rank)] = open_native_mesh(options, *rendezvous);
    });
    return opened;
  }
  static Driver& driver(Opened& opened, int rank) {
    return *opened[static_cast<std::size_t>(rank)]->value();
  }
  static const Error& error(Opened& opened, int rank) {
    return opened[static_cast<std::size_t>(rank)]->error();
  }
  TemporaryFolder folder_;
};

void expect_exchange_works(Driver& driver) {
  Buffer in;
  const int peer = 1 - driver.rank().value;
  const auto message = message_of(4, 1000);
  Exchange exchange = waiting_for(peer, in);
  exchange.sends.push_back({Rank{peer}, message});
  ASSERT_TRUE(driver.exchange(exchange, soon()).ok());
  EXPECT_TRUE(holds(in, 4, 1000));
  EXPECT_TRUE(driver.flush(soon()).ok());
}

TEST_F(MeshTest, StrangersDoNotStopIt) {
  std::vector<Stranger> strangers;
  on_ranks(2, [&](int rank) {
    auto files = make_file_rendezvous(folder_.path());
    // Rank 0 listens when it publishes itself; the strangers come before rank 1 does.
    WatchedRendezvous rendezvous(*files, [&](const std::string& key, const std::string& value) {
      if (key != "mesh/rank/0") return;
      driver::Hello hello;
      hello.size = 2;
      hello.rank = 1;
      for (int i = 0; i < 5; ++i) strangers.emplace_back(port_of(value));
      strangers[0].say(message_of(99, 500));          // garbage
      strangers[1].say(driver::encode_hello(hello));  // a wrong token
      strangers[2].say(message_of(1, 10));            // too little, then silence
      { const Stranger hasty(port_of(value)); }       // gone at once
    });
    if (rank == 1) std::this_thread::sleep_for(200ms);
    const auto start = Clock::now();
    auto opened = open_native_mesh(mesh_options(rank, 2), rendezvous);
    ASSERT_TRUE(opened.ok()) << opened.error().message;
    EXPECT_LT(Clock::now() - start, 1500ms);
    if (rank == 0) {
      EXPECT_EQ(strangers[0].listen_until_closed(1000), 0);
      EXPECT_EQ(strangers[1].listen_until_closed(1000), 0);
      EXPECT_EQ(strangers[3].listen_until_closed(1000), 0);  // was silent
    }
    expect_exchange_works(*opened.value());
  });
}

TEST_F(MeshTest, OtherSettingsAreAMismatchOnBoth) {
  auto opened = open(2, [](NativeMeshOptions& options) {
    if (options.rank.value == 1) options.settings = "codec=raw\nverify=0";
  });
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_FALSE(opened[static_cast<std::size_t>(rank)]->ok());
    const Error& why = error(opened, rank);
    EXPECT_EQ(why.kind, ErrorKind::kMismatch);
    EXPECT_EQ(why.culprit.value, 1);
    EXPECT_EQ(why.rank.value, rank);
    EXPECT_NE(why.message.find("codec=raw\nverify=0"), std::string::npos) << why.message;
    EXPECT_NE(why.message.find("codec=auto"), std::string::npos) << why.message;
  }
}

TEST_F(MeshTest, AnotherSizeIsAMismatchAtOnce) {
  const auto start = Clock::now();
  auto opened = open(2, [](NativeMeshOptions& options) {
    if (options.rank.value == 1) options.size = 3;
  });
  EXPECT_LT(Clock::now() - start, 3s);
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_FALSE(opened[static_cast<std::size_t>(rank)]->ok());
    EXPECT_EQ(error(opened, rank).kind, ErrorKind::kMismatch);
    EXPECT_NE(error(opened, rank).message.find("n = 3"), std::string::npos);
  }
}

TEST_F(MeshTest, ARankThatNeverComesIsNamed) {
  Opened opened(4);
  const auto start = Clock::now();
  on_ranks(4, [&](int rank) {
    if (rank == 1 || rank == 3) return;
    auto options = mesh_options(rank, 4);
    options.timeout = 300ms;
    auto rendezvous = make_file_rendezvous(folder_.path());
    opened[static_cast<std::size_t>(rank)] = open_native_mesh(options, *rendezvous);
  });
  EXPECT_LT(Clock::now() - start, 2s);
  for (const int rank : {0, 2}) {
    ASSERT_FALSE(opened[static_cast<std::size_t>(rank)]->ok());
    EXPECT_EQ(error(opened, rank).kind, ErrorKind::kDeadline);
    EXPECT_EQ(error(opened, rank).culprit.value, 1);
    EXPECT_NE(error(opened, rank).message.find("ranks 1, 3"), std::string::npos)
        << error(opened, rank).message;
  }
}

TEST_F(MeshTest, ARankThatPublishesButNeverConnectsIsNamed) {
  auto files = make_file_rendezvous(folder_.path());
  std::promise<Stranger> arrived;
  WatchedRendezvous rendezvous(*files, [&](const std::string& key, const std::string& value) {
    if (key != "mesh/rank/0") return;
    ASSERT_TRUE(files->set("mesh/rank/1", value).ok());
    arrived.set_value(Stranger(port_of(value)));
  });
  auto options = mesh_options(0, 2);
  options.timeout = 3500ms;
  const auto start = Clock::now();
  Clock::duration closed_after{};
  std::thread listener([&] {
    Stranger silent = arrived.get_future().get();
    EXPECT_EQ(silent.listen_until_closed(5000), 0);
    closed_after = Clock::now() - start;
  });
  const auto opened = open_native_mesh(options, rendezvous);
  listener.join();
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().kind, ErrorKind::kDeadline);
  EXPECT_EQ(opened.error().culprit.value, 1);
  EXPECT_GE(closed_after, 1900ms);
  EXPECT_LT(closed_after, 3200ms);  // not only at the end of start-up
}

TEST_F(MeshTest, AReasonThatComesSoonExplainsALostPeer) {
  auto opened = open(3, [](NativeMeshOptions&) {});
  const Error reason = make_error(ErrorKind::kCapacity, "no memory on rank 2", Rank{2});
  Status status;
  std::thread waiting([&] {
    Buffer in;
    status = driver(opened, 0).exchange(waiting_for(2, in), soon());
  });
  std::this_thread::sleep_for(50ms);
  const auto start = Clock::now();
  opened[2].reset();
  std::this_thread::sleep_for(5ms);
  driver(opened, 1).abort(reason);
  const auto took = Clock::now() - start;
  waiting.join();
  ASSERT_FALSE(status.ok());
  if (status.error().kind == ErrorKind::kPeerLost && took > 40ms) {
    GTEST_SKIP() << "the machine is too busy for a reason within the grace of 50 ms";
  }
  EXPECT_EQ(status.error().kind, ErrorKind::kCapacity) << status.error().message;
}

/// Rank 0 sends more than the system takes at once and aborts; what rank 1 gets. False when the
/// abort ran into its bound (a busy machine), so that nothing can be said.
bool abort_behind_a_message(Driver& sender, Driver& receiver) {
  constexpr std::size_t kBytes = 8 << 20;
  Clock::duration abort_took{};
  bool whole = false;
  Status status;
  std::thread receiving([&] {
    Buffer in;
    status = receiver.exchange(waiting_for(0, in, kBytes), soon());
    whole = holds(in, 1, kBytes);
    if (status.ok()) status = receiver.exchange(waiting_for(0, in), soon());
  });
  const auto message = message_of(1, kBytes);
  Exchange exchange;
  exchange.sends.push_back({Rank{1}, message});
  EXPECT_TRUE(sender.exchange(exchange, soon()).ok());
  const auto start = Clock::now();
  sender.abort(make_error(ErrorKind::kCapacity, "reason"));
  abort_took = Clock::now() - start;
  receiving.join();
  if (abort_took > 150ms) return false;
  EXPECT_TRUE(whole);
  EXPECT_TRUE(!status.ok() && status.error().kind == ErrorKind::kCapacity);
  return true;
}

TEST_F(MeshTest, AnAbortLeavesTheMessageBeforeItWhole) {
  for (int attempt = 0; attempt < 10; ++attempt) {
    auto opened = open(2, [](NativeMeshOptions&) {});
    if (abort_behind_a_message(driver(opened, 0), driver(opened, 1))) return;
    std::filesystem::remove_all(folder_.path());
  }
  GTEST_SKIP() << "the machine is too busy for an abort in 150 ms";
}

TEST_F(MeshTest, RanksOfOneHostShareIt) {
  auto opened = open(4, [](NativeMeshOptions& options) {
    options.host_id = options.rank.value % 2 == 0 ? "host a" : "host\nb";
  });
  for (int rank = 0; rank < 4; ++rank) {
    const Topology& topology = driver(opened, rank).topology();
    ASSERT_EQ(topology.size(), 4);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(topology.places[static_cast<std::size_t>(i)].host, i % 2);
      EXPECT_EQ(topology.places[static_cast<std::size_t>(i)].local_rank, i / 2);
    }
  }
}

TEST_F(MeshTest, ThreadsOfOneProcessShareTheDefaultHost) {
  auto opened = open(2, [](NativeMeshOptions&) {});
  EXPECT_EQ(driver(opened, 0).topology().places[1].host, 0);
  EXPECT_EQ(driver(opened, 0).topology().places[1].local_rank, 1);
}

TEST_F(MeshTest, AnUnusableAddressIsUnsupported) {
  for (const char* address : {"not-an-address", "192.0.2.1"}) {
    auto options = mesh_options(0, 2);
    options.address = address;
    auto rendezvous = make_file_rendezvous(folder_.path());
    const auto opened = open_native_mesh(options, *rendezvous);
    ASSERT_FALSE(opened.ok());
    EXPECT_EQ(opened.error().kind, ErrorKind::kUnsupported);
    EXPECT_NE(opened.error().message.find(address), std::string::npos);
  }
}

TEST_F(MeshTest, FlushWaitsForAReaderOnlyUntilItsDeadline) {
  auto opened = open(2, [](NativeMeshOptions&) {});
  const auto message = message_of(1, 8 << 20);
  Exchange exchange;
  exchange.sends.push_back({Rank{1}, message});
  ASSERT_TRUE(driver(opened, 0).exchange(exchange, soon()).ok());
  const auto start = Clock::now();
  const Status status = driver(opened, 0).flush(start + 100ms);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kDeadline);
  EXPECT_EQ(status.error().culprit.value, 1);
  EXPECT_LT(Clock::now() - start, 3s);
}

TEST_F(MeshTest, AnExchangeWaitsForTheSendsOfTheOneBefore) {
  auto opened = open(2, [](NativeMeshOptions&) {});
  const auto message = message_of(1, 8 << 20);
  Exchange exchange;
  exchange.sends.push_back({Rank{1}, message});
  ASSERT_TRUE(driver(opened, 0).exchange(exchange, soon()).ok());
  const Status status = driver(opened, 0).exchange(Exchange{}, soon(100ms));
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kDeadline);
  EXPECT_EQ(status.error().culprit.value, 1);
  EXPECT_NE(status.error().message.find("not taken by rank 1"), std::string::npos);
}

TEST_F(MeshTest, AFlushEndsWhenTheReaderReads) {
  auto opened = open(2, [](NativeMeshOptions&) {});
  on_ranks(2, [&](int rank) {
    Buffer in;
    if (rank == 0) {
      const auto message = message_of(1, 32 << 20);
      Exchange exchange;
      exchange.sends.push_back({Rank{1}, message});
      EXPECT_TRUE(driver(opened, 0).exchange(exchange, soon()).ok());
      EXPECT_TRUE(driver(opened, 0).flush(soon()).ok());
    } else {
      EXPECT_TRUE(driver(opened, 1).exchange(waiting_for(0, in, 32 << 20), soon()).ok());
      EXPECT_TRUE(holds(in, 1, 32 << 20));
    }
  });
}

TEST(AddressTest, FindsTheLoopback) {
  EXPECT_EQ(address_towards("127.0.0.1", 80, "").value(), "127.0.0.1");
  EXPECT_EQ(address_towards("anything", 80, "lo").value(), "127.0.0.1");
}

TEST(AddressTest, NamesWhatIsMissing) {
  const auto missing = address_towards("127.0.0.1", 80, "no-such-interface");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().kind, ErrorKind::kUnsupported);
  EXPECT_NE(missing.error().message.find("no-such-interface"), std::string::npos);
  EXPECT_FALSE(address_towards("no-such-host.invalid", 80, "").ok());
}

}  // namespace
}  // namespace zensync::test
