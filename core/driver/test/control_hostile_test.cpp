// Control connections with a peer that vanishes, keeps silent, does not read or sends garbage: an
// impostor in the place of the last rank. Place: tests of driver. POSIX only.
#include <sys/ioctl.h>

#include "control_worlds.hpp"
#include "messages.hpp"

namespace zensync::test {
namespace {

using driver::FrameKind;
using driver::Progress;

ControlPlan with_impostor() {
  ControlPlan plan;
  plan.has_impostor = true;
  return plan;
}

/// Until rank 0 knows from a beat that `rank` is behind; false if that does not come.
bool is_behind_soon(Control& control, int rank) {
  const auto until = soon(kEnough);
  while (control.behind().value != rank) {
    if (Clock::now() > until) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

class ControlLossTest : public ::testing::TestWithParam<int> {
 protected:
  ControlWorld world_{GetParam(), with_impostor()};
};

TEST_P(ControlLossTest, ARankThatVanishesIsNamedByAll) {
  ASSERT_EQ(world_.impostor().to(0).hear(driver::kBeatBytes, 5000).size(), driver::kBeatBytes);
  for (int rank = 0; rank < world_.real_size(); ++rank) start_job(world_.at(rank), "table");
  const auto start = Clock::now();
  world_.impostor().vanish();
  const auto fault = world_.common_fault(1000ms);
  EXPECT_LT(Clock::now() - start, 1s);
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->kind, ErrorKind::kPeerLost);
  EXPECT_EQ(fault->culprit.value, GetParam() - 1);
  EXPECT_EQ(fault->tensor, "table");
}

TEST_P(ControlLossTest, AReasonExplainsALossEvenWhereItWasNotSent) {
  const auto frame = driver::encode_abort(make_error(ErrorKind::kCapacity, "reason", Rank{0}));
  world_.impostor().to(0).say(frame);
  world_.impostor().vanish();
  const auto fault = world_.common_fault();
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->message, "reason");
  EXPECT_EQ(fault->kind, ErrorKind::kCapacity);
  EXPECT_EQ(fault->rank.value, GetParam() - 1);
  EXPECT_EQ(fault->culprit.value, 0);
}

TEST_P(ControlLossTest, ARankMayEndWhileALossWaitsForAReason) {
  world_.impostor().vanish();
  std::this_thread::sleep_for(20ms);
  for (int rank = 0; rank < world_.real_size(); ++rank) EXPECT_LT(world_.close(rank), 1s);
}

INSTANTIATE_TEST_SUITE_P(Sizes, ControlLossTest, ::testing::Values(2, 3, 5));

struct Garbage {
  const char* what;
  std::vector<std::byte> bytes;
};

std::vector<Garbage> all_garbage() {
  auto abort = driver::encode_abort(make_error(ErrorKind::kCapacity, "reason"));
  abort[driver::kPrefixBytes] = std::byte{200};  // no such kind of error
  std::vector<Garbage> all = {
      {"noise", message_of(7, 5000)},
      {"zeros", std::vector<std::byte>(100)},
      {"a message", frame_of(FrameKind::kData, 10, message_of(7, 10))},
      {"an unknown kind", frame_of(static_cast<FrameKind>(77), 5, message_of(7, 5))},
      {"a goodbye with more to say", frame_of(FrameKind::kGoodbye, 5, message_of(7, 5))},
      {"a short beat", frame_of(FrameKind::kBeat, 27, message_of(7, 27))},
      {"a long beat", frame_of(FrameKind::kBeat, 29, message_of(7, 29))},
      {"an abort of an unknown kind", abort},
      {"an empty abort", frame_of(FrameKind::kAbort, 0, {})},
      {"an endless length", frame_of(FrameKind::kBeat, (std::uint64_t{1} << 48) - 1, {})},
      {"a length beyond all frames", frame_of(FrameKind::kAbort, driver::kMaxAbortBytes + 1, {})}};
  const auto beat = driver::encode_beat({});
  std::vector<std::byte> mixed(beat.begin(), beat.end());
  mixed.insert(mixed.end(), all[0].bytes.begin(), all[0].bytes.end());
  all.push_back({"noise behind a beat", std::move(mixed)});
  return all;
}

TEST(ControlHostile, GarbageIsALostPeer) {
  for (const Garbage& garbage : all_garbage()) {
    ControlWorld world(2, with_impostor());
    world.impostor().to(0).say(garbage.bytes);
    const auto fault = world.common_fault();
    ASSERT_TRUE(fault.has_value()) << garbage.what;
    EXPECT_EQ(fault->kind, ErrorKind::kPeerLost) << garbage.what;
    EXPECT_EQ(fault->culprit.value, 1) << garbage.what;
    EXPECT_NE(fault->message.find("something else than a frame"), std::string::npos)
        << garbage.what << ": " << fault->message;
  }
}

/// Control: the same impostor with good frames, however they are cut, causes no fault.
TEST(ControlHostile, GoodFramesMayComeInAnyPieces) {
  ControlWorld world(2, with_impostor());
  start_job(world.at(0), "table");
  ASSERT_TRUE(is_behind_soon(world.at(0), 1));
  Progress progress;
  progress.jobs_begun = 1;
  progress.exchange = 1;
  for (const std::byte& byte : driver::encode_beat(progress))
    world.impostor().to(0).say({&byte, 1});
  ASSERT_TRUE(is_behind_soon(world.at(0), -1));
  std::vector<std::byte> many;
  for (int i = 0; i < 2000; ++i) {
    progress.exchange = static_cast<std::uint32_t>(i % 2);
    const auto beat = driver::encode_beat(progress);
    many.insert(many.end(), beat.begin(), beat.end());
  }
  many.insert(many.end(), many.begin(), many.begin() + driver::kBeatBytes);  // the last: behind
  world.impostor().to(0).say(many);
  EXPECT_TRUE(is_behind_soon(world.at(0), 1));
  EXPECT_TRUE(world.is_quiet());
}

TEST(ControlHostile, WhatAGoodbyeLeavesUndoneIsAFault) {
  for (const bool done : {false, true}) {
    ControlWorld world(2, with_impostor());
    start_job(world.at(0), "table");
    Progress progress;
    progress.jobs_begun = 1;
    progress.jobs_done = done ? 1 : 0;
    world.impostor().beat(progress);
    world.impostor().say_to_all(driver::encode_prefix(FrameKind::kGoodbye, 0));
    world.impostor().vanish();
    const auto fault = world.ear(0).truth(done ? 200ms : kEnough);
    EXPECT_EQ(fault.has_value(), !done) << (fault ? fault->message : "no fault");
    EXPECT_EQ(world.ear(0).heard(), !done);
  }
}

ControlPlan short_with_impostor(milliseconds silent_after) {
  ControlPlan plan = with_impostor();
  plan.change = [silent_after](ControlOptions& options) {
    shorten(options);
    options.silent_after = silent_after;
  };
  return plan;
}

TEST(ControlSilence, ASilentRankIsGivenUpByThoseWhoWait) {
  const auto start = Clock::now();
  ControlWorld world(3, short_with_impostor(400ms));
  start_job(world.at(0), "table");
  const auto fault = world.common_fault();  // rank 1, which waits for nobody, is told
  EXPECT_GE(Clock::now() - start, 400ms);
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->kind, ErrorKind::kPeerLost);
  EXPECT_EQ(fault->rank.value, 0);
  EXPECT_EQ(fault->culprit.value, 2);
  EXPECT_EQ(fault->tensor, "table");
  EXPECT_NE(fault->message.find("nothing was heard from its process"), std::string::npos);
}

TEST(ControlSilence, NobodyIsGivenUpByThoseWhoDoNotWait) {
  ControlWorld world(3, short_with_impostor(400ms));
  std::this_thread::sleep_for(600ms);
  EXPECT_TRUE(world.is_quiet());
  world.at(1).begin_dense("bias");
  const auto fault = world.common_fault();
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->rank.value, 1);
  EXPECT_EQ(fault->culprit.value, 2);
  EXPECT_EQ(fault->tensor, "bias");
}

TEST(ControlSilence, ARankThatBeatsIsSlowNotDead) {
  ControlWorld world(2, short_with_impostor(700ms));
  start_job(world.at(0), "table");
  for (const auto until = soon(1200ms); Clock::now() < until;) {
    world.impostor().beat();
    std::this_thread::sleep_for(20ms);
  }
  EXPECT_TRUE(world.is_quiet());
  EXPECT_EQ(world.at(0).behind().value, 1);
  const auto notices = world.at(0).take_notices();
  ASSERT_GE(notices.size(), 2U);
  EXPECT_LE(notices.size(), 6U);  // ever rarer
  EXPECT_NE(notices[0].find("rank 1 has not come to it, its process lives"), std::string::npos);
}

TEST(ControlBeats, KeepComingWhileTheRankIsBusy) {
  ControlWorld world(2, with_impostor());
  world.at(0).begin_job("table");
  world.at(0).begin_exchange("push");
  world.at(0).begin_exchange("pull");
  std::vector<std::byte> beats;
  std::thread hearing([&] { beats = world.impostor().to(0).hear(8 * driver::kBeatBytes, 5000); });
  std::atomic<bool> heard{false};
  std::thread waiting([&] {
    hearing.join();
    heard = true;
  });
  const auto until = soon(kEnough);
  while (!heard && Clock::now() < until) {  // busy, and calls nothing of the control's
  }
  waiting.join();
  ASSERT_EQ(beats.size(), 8 * driver::kBeatBytes);
  const auto last =
      driver::decode_beat(std::span(beats).subspan(7 * driver::kBeatBytes + driver::kPrefixBytes));
  ASSERT_TRUE(last.has_value());
  EXPECT_EQ(last->jobs_begun, 1U);
  EXPECT_EQ(last->jobs_done, 0U);
  EXPECT_EQ(last->exchange, 2U);
}

/// This process's socket whose peer has `port`; −1 if there is none.
int handle_towards(int port) {
  for (int handle = 3; handle < 1024; ++handle) {
    sockaddr_in address{};
    socklen_t length = sizeof address;
    if (::getpeername(handle, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
        address.sin_family == AF_INET && ntohs(address.sin_port) == port) {
      return handle;
    }
  }
  return -1;
}

constexpr int kSmallBytes = 2048;

/// Waits until beats stay in `handle`'s buffer because its peer does not read.
void fill_up(int handle) {
  int before = -1;
  for (const auto until = soon(1000ms); Clock::now() < until;) {
    std::this_thread::sleep_for(50ms);
    int waiting = 0;
    ::ioctl(handle, TIOCOUTQ, &waiting);
    if (waiting > 0 && waiting == before) return;
    before = waiting;
  }
}

/// How long a rank takes to close whose peer does not read.
Clock::duration close_beside_a_peer_that_does_not_read() {
  ControlPlan plan = with_impostor();
  plan.receive_bytes = kSmallBytes;
  plan.change = [](ControlOptions& options) { options.beat = 1ms; };
  ControlWorld world(3, plan);
  const int handle = handle_towards(world.impostor().to(0).own_port());
  EXPECT_GE(handle, 0);
  ::setsockopt(handle, SOL_SOCKET, SO_SNDBUF, &kSmallBytes, sizeof kSmallBytes);
  fill_up(handle);
  world.at(0).report(make_error(ErrorKind::kCapacity, "reason"));
  EXPECT_TRUE(world.common_fault(1s).has_value());  // the rank that reads is told all the same
  return world.close(0);
}

TEST(ControlEnds, APeerThatDoesNotReadHoldsNobodyUp) {
  // Now and then the system makes room at last: then nothing was in the way of the goodbye.
  for (int attempt = 0; attempt < 20; ++attempt) {
    const auto took = close_beside_a_peer_that_does_not_read();
    ASSERT_LT(took, 1s);
    if (took >= 150ms) return;
  }
  FAIL() << "the goodbye could always be written, so the test shows nothing";
}

TEST(ControlStrangers, AreRefused) {
  const TemporaryFolder folder;
  std::vector<Stranger> strangers;
  int port = 0;
  std::vector<std::unique_ptr<Control>> controls(2);
  on_ranks(2, [&](int rank) {
    std::shared_ptr<Rendezvous> files = make_file_rendezvous(folder.path());
    const auto watched = std::make_shared<WatchedRendezvous>(
        *files, [&, files](const std::string& key, const std::string& value) {
          if (key != "control/rank/0") return;
          port = port_of(value);
          driver::Hello hello;
          hello.size = 2;
          hello.rank = 1;
          for (int i = 0; i < 3; ++i) strangers.emplace_back(port);
          strangers[0].say(message_of(99, 500));          // garbage
          strangers[1].say(driver::encode_hello(hello));  // a wrong token
          strangers[2].say(driver::encode_beat({}));      // as if it were a member, then silence
        });
    if (rank == 1) std::this_thread::sleep_for(100ms);
    auto opened = open_control(control_options(rank, 2), watched);
    ASSERT_TRUE(opened.ok()) << opened.error().message;
    controls[static_cast<std::size_t>(rank)] = std::move(opened.value());
  });
  for (Stranger& stranger : strangers) {
    EXPECT_TRUE(stranger.connected());
    EXPECT_EQ(stranger.listen_until_closed(2500), 0);
  }
  EXPECT_FALSE(Stranger(port).connected());  // nobody listens any more
}

}  // namespace
}  // namespace zensync::test
