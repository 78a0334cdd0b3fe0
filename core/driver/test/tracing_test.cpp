// The tracing decorator: what it notes of each call, and the JSON made of it.
// Place: tests of driver; that it changes nothing is shown by the contract suite.
#include <gtest/gtest.h>

#include "messages.hpp"
#include "worlds.hpp"

namespace zensync::test {
namespace {

TEST(Tracing, NotesEveryCall) {
  auto trace = std::make_shared<Trace>();
  Drivers drivers = make_loopback(3);
  for (auto& driver : drivers) driver = make_tracing(std::move(driver), trace);
  const auto message = message_of(5, 100);
  Exchange sending;
  sending.phase = "push";
  for (const int peer : {2, 0, 0}) sending.sends.push_back({Rank{peer}, message});
  Buffer in;
  ASSERT_TRUE(drivers[1]->exchange(sending, soon()).ok());
  ASSERT_TRUE(drivers[1]->flush(soon()).ok());
  ASSERT_TRUE(drivers[0]->exchange(waiting_for(1, in), soon()).ok());
  ASSERT_FALSE(drivers[2]->exchange(waiting_for(0, in), soon(20ms)).ok());
  drivers[2]->abort(make_error(ErrorKind::kDeadline, "late", Rank{0}));

  const auto events = trace->events();
  ASSERT_EQ(events.size(), 5U);
  EXPECT_EQ(events[0].kind, TraceKind::kExchange);
  EXPECT_EQ(events[0].rank.value, 1);
  EXPECT_EQ(events[0].phase, "push");
  EXPECT_EQ(events[0].sent_bytes, 3 * (100 + kFramePrefixBytes));
  EXPECT_EQ(events[0].sent_to, (std::vector{0, 2}));
  EXPECT_TRUE(events[0].awaited_from.empty());
  EXPECT_EQ(events[1].kind, TraceKind::kFlush);
  EXPECT_EQ(events[2].received_bytes, 100 + kFramePrefixBytes);
  EXPECT_EQ(events[2].awaited_from, std::vector{1});
  ASSERT_FALSE(events[3].status.ok());
  EXPECT_EQ(events[3].status.error().kind, ErrorKind::kDeadline);
  EXPECT_EQ(events[3].received_bytes, 0U);
  EXPECT_GE(events[3].end_ns - events[3].start_ns, 20'000'000);
  EXPECT_EQ(events[4].kind, TraceKind::kAbort);
  EXPECT_EQ(events[4].status.error().culprit.value, 0);
  for (std::size_t i = 0; i < events.size(); ++i) EXPECT_LE(events[i].start_ns, events[i].end_ns);
}

TEST(Tracing, KeepsNoMoreThanItWasTold) {
  Trace trace(2);
  for (int i = 0; i < 5; ++i) trace.add(TraceEvent());
  EXPECT_EQ(trace.events().size(), 2U);
  EXPECT_EQ(trace.left_out(), 3U);
}

TEST(Tracing, MayBeSharedByThreads) {
  auto trace = std::make_shared<Trace>();
  Drivers drivers = make_loopback(4);
  for (auto& driver : drivers) driver = make_tracing(std::move(driver), trace);
  on_ranks(4, [&](int rank) {
    for (int i = 0; i < 200; ++i) {
      ASSERT_TRUE(drivers[static_cast<std::size_t>(rank)]->exchange(Exchange(), soon()).ok());
    }
  });
  EXPECT_EQ(trace->events().size(), 800U);
}

TEST(Tracing, WritesWhatAViewerReads) {
  Trace trace;
  TraceEvent event;
  event.rank = Rank{3};
  event.phase = "push";
  event.start_ns = 1'000'000'007;
  event.end_ns = 1'000'002'107;
  event.sent_bytes = 12;
  event.sent_to = {0, 1};
  trace.add(event);
  event.kind = TraceKind::kAbort;
  event.phase.clear();
  event.sent_to.clear();
  event.status =
      make_error(ErrorKind::kDeadline, "a \"quote\", a \\, a\nline, \xC3\xA4, \xFF\xC3", Rank{1});
  trace.add(event);
  const std::string want =
      R"({"displayTimeUnit":"ns","otherData":{"events_left_out":"0"},"traceEvents":[)"
      R"({"name":"process_name","ph":"M","pid":3,"args":{"name":"rank 3"}},)"
      "\n"
      R"({"name":"exchange push","cat":"driver","ph":"X","pid":3,"tid":0,"ts":1000000.007,)"
      R"("dur":2.100,"args":{"sent_bytes":12,"received_bytes":0,"sent_to":[0,1]}},)"
      "\n"
      R"({"name":"abort","cat":"driver","ph":"X","pid":3,"tid":0,"ts":1000000.007,"dur":2.100,)"
      R"("args":{"sent_bytes":12,"received_bytes":0,"error":"a \"quote\", a \\, a\u000aline, )"
      "\xC3\xA4"
      R"(, \ufffd\ufffd","culprit":1}}]})"
      "\n";
  EXPECT_EQ(trace.chrome_json(), want);
}

TEST(Tracing, AnEmptyTraceIsGoodJson) {
  EXPECT_NE(Trace().chrome_json().find("\"traceEvents\":[]"), std::string::npos);
}

}  // namespace
}  // namespace zensync::test
