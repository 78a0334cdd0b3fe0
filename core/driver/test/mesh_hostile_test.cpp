// The native mesh with a peer that misbehaves: a plain socket that knows the token, takes the place
// of rank 1, and then lies, breaks frames or vanishes without a word. Place: tests of driver. Rank
// 0 is real and runs on the test's thread; the impostor is a Stranger.
#include <gtest/gtest.h>

#include <optional>

#include "impostor.hpp"
#include "messages.hpp"
#include "strangers.hpp"
#include "wire.hpp"
#include "worlds.hpp"

namespace zensync::test {
namespace {

using driver::FrameKind;
using driver::Hello;

class HostileTest : public ::testing::Test {
 protected:
  /// Opens rank 0 of 2; the impostor greets as rank 1 with what `change` makes of a right hello.
  Result<std::unique_ptr<Driver>> open(const std::function<void(Hello&)>& change = {},
                                       std::chrono::milliseconds timeout = 10s) {
    auto files = make_file_rendezvous(folder_.path());
    std::thread impostor([&] {
      auto rendezvous = make_file_rendezvous(folder_.path());
      const std::string record = rendezvous->wait("mesh/rank/0", 5s).value();
      const std::string token = rendezvous->wait("mesh/token", 5s).value();
      Hello hello = right_hello(record, token, 1, 2);
      if (change) change(hello);
      impostor_.emplace(port_of(record));
      impostor_->say(driver::encode_hello(hello));
      ASSERT_TRUE(rendezvous->set("mesh/rank/1", record).ok());
    });
    auto options = mesh_options(0, 2);
    options.timeout = timeout;
    auto opened = open_native_mesh(options, *files);
    impostor.join();
    return opened;
  }

  /// What rank 0's exchange says after the impostor has sent `bytes` (and is gone, if `leave`).
  Status after(const std::vector<std::byte>& bytes, bool leave) {
    auto opened = open();
    if (!opened.ok()) return opened.error();
    impostor_->say(bytes);
    if (leave) impostor_.reset();
    return opened.value()->exchange(waiting_for(1, in_, 100), soon(5s));
  }

  TemporaryFolder folder_;
  std::optional<Stranger> impostor_;
  Buffer in_;
};

TEST_F(HostileTest, TheImpostorIsGoodEnough) {
  // Without this the tests below could fail for another reason.
  const Status status = after(frame_of(FrameKind::kData, 50, message_of(8, 50)), false);
  EXPECT_TRUE(status.ok());
  EXPECT_TRUE(holds(in_, 8, 50));
}

TEST_F(HostileTest, AMemberThatGreetsDifferentlyIsAMismatch) {
  const auto changes = std::vector<std::function<void(Hello&)>>{
      [](Hello& hello) { hello.settings_digest ^= 1; }, [](Hello& hello) { hello.version += 1; },
      [](Hello& hello) { hello.size = 3; }, [](Hello& hello) { hello.host_digest ^= 1; }};
  for (const auto& change : changes) {
    const auto opened = open(change);
    ASSERT_FALSE(opened.ok());
    EXPECT_EQ(opened.error().kind, ErrorKind::kMismatch);
    EXPECT_EQ(opened.error().culprit.value, 1);
    EXPECT_EQ(impostor_->listen_until_closed(1000), static_cast<int>(driver::kHelloBytes));
    std::filesystem::remove_all(folder_.path());
  }
}

TEST_F(HostileTest, AWrongTokenOrRankIsAStranger) {
  const auto changes = std::vector<std::function<void(Hello&)>>{
      [](Hello& hello) { hello.token[15] ^= std::byte{1}; }, [](Hello& hello) { hello.rank = 0; },
      [](Hello& hello) { hello.rank = 2; }, [](Hello& hello) { hello.rank = -1; }};
  for (const auto& change : changes) {
    const auto opened = open(change, 1s);
    ASSERT_FALSE(opened.ok());
    EXPECT_EQ(opened.error().kind, ErrorKind::kDeadline);
    EXPECT_EQ(impostor_->listen_until_closed(1000), 0);
    std::filesystem::remove_all(folder_.path());
  }
}

TEST_F(HostileTest, AnEndWithoutAWordIsALostPeer) {
  const Status status = after({}, true);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kPeerLost);
  EXPECT_EQ(status.error().culprit.value, 1);
}

TEST_F(HostileTest, AnEndInTheMiddleOfAMessageIsALostPeer) {
  const Status status = after(frame_of(FrameKind::kData, 50, message_of(8, 49)), true);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kPeerLost);
}

TEST_F(HostileTest, AnEndInTheMiddleOfAnAbortIsALostPeer) {
  auto frame = driver::encode_abort(make_error(ErrorKind::kCapacity, "reason"));
  frame.pop_back();
  const Status status = after(frame, true);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kPeerLost);
}

TEST_F(HostileTest, AnEndWithoutAWordIsNoticedWithoutWaitingForThatPeer) {
  auto opened = open();
  ASSERT_TRUE(opened.ok());
  impostor_.reset();
  std::this_thread::sleep_for(20ms);
  // Nothing is awaited from the impostor; a flush of what it will never read finds out.
  const auto message = message_of(1, 32 << 20);
  Exchange exchange;
  exchange.sends.push_back({Rank{1}, message});
  Status status = opened.value()->exchange(exchange, soon());
  if (status.ok()) status = opened.value()->flush(soon());
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kPeerLost);
}

TEST_F(HostileTest, AnUnknownKindIsCorrupt) {
  for (const int kind : {2, 3, 77, 65535}) {
    const auto bytes = frame_of(static_cast<FrameKind>(kind), 5, message_of(8, 5));
    const Status status = after(bytes, false);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().kind, ErrorKind::kCorruptMessage) << kind;
    EXPECT_EQ(status.error().culprit.value, 1);
    std::filesystem::remove_all(folder_.path());
  }
}

TEST_F(HostileTest, AnAbortOfNonsenseIsCorrupt) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{30}, std::size_t{60000}}) {
    const Status status = after(frame_of(FrameKind::kAbort, size, message_of(8, size)), false);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().kind, ErrorKind::kCorruptMessage) << size;
    std::filesystem::remove_all(folder_.path());
  }
}

TEST_F(HostileTest, AnEndlessLengthIsCorruptBeforeAnythingIsStored) {
  const auto bytes = frame_of(FrameKind::kData, (std::uint64_t{1} << 48) - 1, message_of(8, 50));
  const Status status = after(bytes, false);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kCorruptMessage);
  EXPECT_EQ(in_.capacity(), 0U);
}

TEST_F(HostileTest, TheReporterOfAnAbortWithoutOneIsItsSender) {
  const auto frame = driver::encode_abort(make_error(ErrorKind::kCapacity, "reason", Rank{0}));
  const Status status = after(frame, true);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kCapacity);
  EXPECT_EQ(status.error().message, "reason");
  EXPECT_EQ(status.error().rank.value, 1);
  EXPECT_EQ(status.error().culprit.value, 0);
}

}  // namespace
}  // namespace zensync::test
