// The connections of a native mesh where a rank has published itself and cannot be reached, or all
// have reason to give up. Place: tests of driver. One rank is real; the records of the others are
// written for them.
#include <gtest/gtest.h>

#include <optional>

#include "strangers.hpp"
#include "worlds.hpp"

namespace zensync::test {
namespace {

/// A record with another port.
std::string with_port(const std::string& record, int port) {
  std::string text = record;
  const std::string old = "\n" + std::to_string(port_of(record)) + "\n";
  return text.replace(text.find(old), old.size(), "\n" + std::to_string(port) + "\n");
}

class MeshConnectTest : public ::testing::Test {
 protected:
  /// Where rank `self` of two meets the other, which publishes itself at `port` right after it.
  WatchedRendezvous& meet_at(int self, int port) {
    const auto key_of = [](int rank) { return "mesh/rank/" + std::to_string(rank); };
    files_ = make_file_rendezvous(folder_.path());
    const auto publish = [=, this](const std::string& key, const std::string& value) {
      if (key != key_of(self)) return;
      ASSERT_TRUE(files_->set(key_of(1 - self), with_port(value, port)).ok());
      if (self == 0) return;  // it publishes the token itself
      ASSERT_TRUE(files_->set("mesh/token", std::string(32, 'a')).ok());
    };
    return rendezvous_.emplace(*files_, publish);
  }

 private:
  TemporaryFolder folder_;
  std::unique_ptr<Rendezvous> files_;
  std::optional<WatchedRendezvous> rendezvous_;
};

void expect_unreachable(const Result<std::unique_ptr<Driver>>& opened, int peer, int port) {
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().kind, ErrorKind::kUnsupported);
  EXPECT_EQ(opened.error().culprit.value, peer);
  EXPECT_NE(opened.error().message.find("127.0.0.1:" + std::to_string(port) + " cannot be reached"),
            std::string::npos)
      << opened.error().message;
}

TEST_F(MeshConnectTest, AnAddressThatNeverAnswersIsUnsupported) {
  const SilentListener silent;
  WatchedRendezvous& rendezvous = meet_at(1, silent.port());
  auto options = mesh_options(1, 2);
  options.connect_timeout = 300ms;
  const auto start = Clock::now();
  const auto opened = open_native_mesh(options, rendezvous);
  EXPECT_GE(Clock::now() - start, 300ms);
  EXPECT_LT(Clock::now() - start, 3s);
  expect_unreachable(opened, 0, silent.port());
}

TEST_F(MeshConnectTest, ARankThatCannotConnectIsUnsupported) {
  WatchedRendezvous& rendezvous = meet_at(0, 9);
  auto options = mesh_options(0, 2);
  options.connect_timeout = 300ms;
  expect_unreachable(open_native_mesh(options, rendezvous), 1, 9);
}

/// Ends within seconds, long before connect_timeout.
void expect_refused_soon(const NativeMeshOptions& options, Rendezvous& rendezvous, int peer) {
  const auto start = Clock::now();
  expect_unreachable(open_native_mesh(options, rendezvous), peer, 9);
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST_F(MeshConnectTest, ALowerRankThatRefusesIsGivenUpSoon) {
  WatchedRendezvous& rendezvous = meet_at(1, 9);
  auto options = mesh_options(1, 2);
  options.connect_timeout = 60s;
  expect_refused_soon(options, rendezvous, 0);
}

TEST_F(MeshConnectTest, AHigherRankThatRefusesIsGivenUpSoon) {
  WatchedRendezvous& rendezvous = meet_at(0, 9);
  auto options = mesh_options(0, 2);
  options.connect_timeout = 60s;
  expect_refused_soon(options, rendezvous, 1);
}

/// Control: a rank that accepts is waited for, although it is slow.
TEST_F(MeshConnectTest, ARankThatAcceptsIsWaitedForLongerThanOneThatRefuses) {
  const SilentListener slow;
  WatchedRendezvous& rendezvous = meet_at(0, slow.port());
  auto options = mesh_options(0, 2);
  options.connect_timeout = 3s;
  const auto start = Clock::now();
  expect_unreachable(open_native_mesh(options, rendezvous), 1, slow.port());
  EXPECT_GE(Clock::now() - start, 3s);
}

TEST_F(MeshConnectTest, AReasonToGiveUpEndsConnecting) {
  const SilentListener silent;
  WatchedRendezvous& rendezvous = meet_at(1, silent.port());
  int asked = 0;
  rendezvous.on_check([&]() -> Status {
    if (++asked < 3) return {};
    return make_error(ErrorKind::kPeerLost, "rank 5 is gone", Rank{5});
  });
  auto options = mesh_options(1, 2);
  options.connect_timeout = 60s;
  const auto start = Clock::now();
  const auto opened = open_native_mesh(options, rendezvous);
  EXPECT_LT(Clock::now() - start, 10s);
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().message, "rank 5 is gone");
  EXPECT_EQ(opened.error().culprit.value, 5);
}

}  // namespace
}  // namespace zensync::test
