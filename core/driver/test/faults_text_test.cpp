// Plans of faults as text: what is read, what is refused and how the error says it.
// Place: tests of driver; pure functions. What the faults do is in faulty_test.cpp.
#include <gtest/gtest.h>

#include "zensync/driver/faulty.hpp"

namespace zensync::test {
namespace {

std::vector<Fault> parsed(const std::string& text) {
  auto plan = parse_faults(text);
  EXPECT_TRUE(plan.ok()) << text << ": " << plan.error().message;
  return plan.ok() ? plan.value().faults : std::vector<Fault>();
}

TEST(FaultsText, ReadsEveryKind) {
  const auto faults = parsed(
      "delay:ms=20; truncate:exchange=0,bytes=3 ;corrupt:exchange=1,peer=2,offset=40,mask=0x80;"
      "duplicate;reorder:peer=all;drop:exchange=every,peer=0;die:exchange=3,after=1,how=signal;");
  ASSERT_EQ(faults.size(), 7U);
  for (std::size_t i = 0; i < faults.size(); ++i) {
    EXPECT_EQ(static_cast<std::size_t>(faults[i].kind), i);
  }
  EXPECT_EQ(faults[0].delay.count(), 20);
  EXPECT_EQ(faults[0].exchange, -1);
  EXPECT_EQ(faults[1].bytes, 3U);
  EXPECT_EQ(faults[1].exchange, 0);
  EXPECT_EQ(faults[2].peer.value, 2);
  EXPECT_EQ(faults[2].offset, 40U);
  EXPECT_EQ(faults[2].mask, 0x80);
  EXPECT_EQ(faults[3].peer.value, -1);
  EXPECT_EQ(faults[5].exchange, -1);
  EXPECT_EQ(faults[5].peer.value, 0);
  EXPECT_TRUE(faults[6].after);
  EXPECT_TRUE(faults[6].signal);
  EXPECT_FALSE(parsed("die:exchange=3").front().signal);
  EXPECT_TRUE(parsed("").empty());
  EXPECT_TRUE(parsed(" \n").empty());
}

TEST(FaultsText, ComesBack) {
  const std::string text =
      "delay:ms=20;truncate:exchange=0,bytes=3;corrupt:exchange=1,peer=2,offset=40,mask=128;"
      "duplicate;reorder:peer=1;drop:exchange=4;die:exchange=3,after=1,how=signal";
  EXPECT_EQ(faults_text(parsed(text)), text);
}

TEST(FaultsText, RefusesWhatItDoesNotKnow) {
  const std::pair<const char*, const char*> cases[] = {
      {"explode", "explode"},
      {"drop;;drop", "fault 2"},
      {"drop:", "nothing behind ':'"},
      {"drop:peer", "NAME=VALUE"},
      {"drop:peer=1,", "last ','"},
      {"drop:peer=one", "'peer' cannot be 'one'"},
      {"drop:peer=", "'peer' cannot be ''"},
      {"drop:peer=-1", "cannot be"},
      {"drop:peer=1,peer=2", "twice"},
      {"drop:exchange=4294967296", "cannot be"},
      {"drop:exchange=18446744073709551616", "cannot be"},
      {"drop:exchange=1 2", "cannot be"},
      {"drop:offset=1", "'offset' means nothing"},
      {"delay:peer=1,ms=1", "'peer' means nothing"},
      {"delay", "needs ms"},
      {"delay:ms=86400001", "cannot be"},
      {"truncate:bytes=0", "cannot be"},
      {"corrupt:mask=0", "cannot be"},
      {"corrupt:mask=256", "cannot be"},
      {"corrupt:mask=0x", "cannot be"},
      {"die:after=2", "cannot be"},
      {"die:how=loudly", "cannot be"},
      {"drop;die:how=vanish,when=now", "fault 2 ('die:how=vanish,when=now')"},
  };
  for (const auto& [text, hint] : cases) {
    const auto plan = parse_faults(text);
    ASSERT_FALSE(plan.ok()) << text;
    EXPECT_EQ(plan.error().kind, ErrorKind::kInvalid);
    EXPECT_NE(plan.error().message.find(hint), std::string::npos) << plan.error().message;
  }
}

}  // namespace
}  // namespace zensync::test
