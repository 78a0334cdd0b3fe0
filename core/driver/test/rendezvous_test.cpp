// The file rendezvous: values appear whole, waits end, and of many compare-sets one wins.
// Place: tests of driver. Each test has a folder of its own.
#include <gtest/gtest.h>

#include <set>

#include "messages.hpp"
#include "worlds.hpp"
#include "zensync/driver/rendezvous.hpp"

namespace zensync::test {
namespace {

class FileRendezvousTest : public ::testing::Test {
 protected:
  std::unique_ptr<Rendezvous> open() { return make_file_rendezvous(folder_.path() / "meeting"); }
  TemporaryFolder folder_;
};

TEST_F(FileRendezvousTest, SetsAndGets) {
  auto one = open();
  auto other = open();
  EXPECT_EQ(one->get("key").value(), "");
  ASSERT_TRUE(one->set("key", "value").ok());
  EXPECT_EQ(other->get("key").value(), "value");
  ASSERT_TRUE(other->set("key", std::string("a\0b\n", 4)).ok());
  EXPECT_EQ(one->get("key").value(), std::string("a\0b\n", 4));
}

TEST_F(FileRendezvousTest, AnyKeyIsAKey) {
  auto rendezvous = open();
  const std::vector<std::string> keys = {"a/b",
                                         "a_b",
                                         "a%2fb",
                                         "..",
                                         "lock",
                                         "",
                                         "\xC3\x9C",
                                         std::string(300, 'x'),
                                         std::string(301, 'x')};
  for (std::size_t i = 0; i < keys.size(); ++i) {
    ASSERT_TRUE(rendezvous->set(keys[i], std::to_string(i)).ok());
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    EXPECT_EQ(rendezvous->get(keys[i]).value(), std::to_string(i));
  }
}

TEST_F(FileRendezvousTest, WaitsForAValue) {
  std::thread writer([&] {
    std::this_thread::sleep_for(60ms);
    EXPECT_TRUE(open()->set("late", "here").ok());
  });
  EXPECT_EQ(open()->wait("late", 5s).value(), "here");
  writer.join();
}

TEST_F(FileRendezvousTest, WaitingEnds) {
  const auto start = Clock::now();
  const auto result = open()->wait("never", 80ms);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().kind, ErrorKind::kDeadline);
  EXPECT_NE(result.error().message.find("never"), std::string::npos);
  EXPECT_GE(Clock::now() - start, 80ms);
  EXPECT_LT(Clock::now() - start, 2s);
}

TEST_F(FileRendezvousTest, ComparesAndSets) {
  auto rendezvous = open();
  EXPECT_EQ(rendezvous->compare_set("key", "other", "x").value(), "");
  EXPECT_EQ(rendezvous->compare_set("key", "", "first").value(), "first");
  EXPECT_EQ(rendezvous->compare_set("key", "", "second").value(), "first");
  EXPECT_EQ(rendezvous->compare_set("key", "first", "third").value(), "third");
  EXPECT_EQ(rendezvous->get("key").value(), "third");
}

TEST_F(FileRendezvousTest, OneOfManyWins) {
  constexpr int kWriters = 8;
  for (int round = 0; round < 20; ++round) {
    const std::string key = "race/" + std::to_string(round);
    std::vector<std::string> seen(kWriters);
    on_ranks(kWriters, [&](int rank) {
      seen[static_cast<std::size_t>(rank)] =
          open()->compare_set(key, "", "writer " + std::to_string(rank)).value();
    });
    EXPECT_EQ(std::set<std::string>(seen.begin(), seen.end()).size(), 1U);
    EXPECT_EQ(open()->get(key).value(), seen[0]);
  }
}

TEST_F(FileRendezvousTest, CountersLoseNoIncrement) {
  constexpr int kWriters = 4;
  constexpr int kEach = 25;
  on_ranks(kWriters, [&](int) {
    auto rendezvous = open();
    for (int done = 0; done < kEach;) {
      const std::string old = rendezvous->get("count").value();
      // Each attempt leaves a text of its own, so that the answer tells who won.
      const int value = old.empty() ? 0 : std::stoi(old);
      const std::string next =
          std::to_string(value + 1) + " " +
          std::to_string(std::hash<std::thread::id>{}(std::this_thread::get_id()));
      if (rendezvous->compare_set("count", old, next).value() == next) ++done;
    }
  });
  EXPECT_EQ(std::stoi(open()->get("count").value()), kWriters * kEach);
}

TEST_F(FileRendezvousTest, ReadersNeverSeeHalfAValue) {
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    auto rendezvous = open();
    for (int i = 0; !stop; ++i) {
      const std::string value(static_cast<std::size_t>(1 + i % 9000),
                              static_cast<char>('a' + i % 26));
      EXPECT_TRUE(rendezvous->set("value", value).ok());
    }
  });
  auto rendezvous = open();
  EXPECT_TRUE(rendezvous->wait("value", 5s).ok());
  for (int i = 0; i < 500; ++i) {
    const std::string value = rendezvous->get("value").value();
    ASSERT_FALSE(value.empty());
    // All bytes of one value are equal, and its length belongs to its letter.
    ASSERT_EQ(value, std::string(value.size(), value[0]));
    ASSERT_EQ(static_cast<int>((value.size() - 1) % 2), (value[0] - 'a') % 2);
  }
  stop = true;
  writer.join();
}

TEST_F(FileRendezvousTest, AFolderThatCannotBeUsedIsAnError) {
  auto rendezvous = make_file_rendezvous("/proc/no-such-folder");
  const Status status = rendezvous->set("key", "value");
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kUnsupported);
}

}  // namespace
}  // namespace zensync::test
