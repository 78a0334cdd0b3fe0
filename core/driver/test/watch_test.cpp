// Slow, silent, gone: what the watch says after which beats and which time, as tables.
// Place: tests of driver; pure, no clock and no sockets. Rank 0 of 4 watches unless a test says
// otherwise; time is handed over, so that every number below is exact.
#include "watch.hpp"

#include <gtest/gtest.h>

#include <chrono>

namespace zensync::driver {
namespace {

using namespace std::chrono_literals;  // NOLINT(google-build-using-namespace): tests only

constexpr Watch::Limits kLimits{10s, 60s};

/// jobs begun, jobs done, exchanges of the current job, dense all-reduces begun
Progress progress_of(std::uint64_t begun, std::uint64_t done, std::uint32_t exchange = 0,
                     std::uint64_t dense = 0) {
  Progress progress;
  progress.jobs_begun = begun;
  progress.jobs_done = done;
  progress.exchange = exchange;
  progress.dense_begun = dense;
  return progress;
}

class WatchTest : public ::testing::Test {
 protected:
  /// This rank waits in exchange `exchange` of its job `job`.
  void wait_in_job(std::uint64_t job, std::uint32_t exchange, const std::string& tensor = "table") {
    watch_.own() = progress_of(job, job - 1, exchange, watch_.own().dense_begun);
    watch_.begin(WaitKind::kJob, tensor, "push");
  }
  void wait_in_dense(std::uint64_t count) {
    watch_.own().dense_begun = count;
    watch_.begin(WaitKind::kDense, "bias", "");
  }
  void all_heard(const Progress& progress) {
    for (int rank = 1; rank < 4; ++rank) watch_.heard(Rank{rank}, progress);
  }
  /// The one notice of a tick, or what is wrong with it.
  std::string notice_after(milliseconds elapsed) {
    const Watch::Verdict verdict = watch_.tick(elapsed);
    if (verdict.notices.size() != 1) return std::to_string(verdict.notices.size()) + " notices";
    return verdict.notices.front();
  }

  Watch watch_{Rank{0}, 4, kLimits};
};

TEST_F(WatchTest, WarningsComeAtTheLimitAndThenAfterTwiceAsLong) {
  wait_in_job(1, 1);
  for (int second = 1; second <= 100; ++second) {
    all_heard(progress_of(0, 0));
    const bool due = second == 10 || second == 20 || second == 40 || second == 80;
    const Watch::Verdict verdict = watch_.tick(1s);
    ASSERT_EQ(verdict.notices.size(), due ? 1U : 0U) << second;
    EXPECT_FALSE(verdict.fault.has_value());
    if (!due) continue;
    const std::string time = " for " + std::to_string(second) + " s: ";
    EXPECT_NE(verdict.notices[0].find(time), std::string::npos) << verdict.notices[0];
  }
}

TEST_F(WatchTest, EveryExchangeIsWaitedForAnew) {
  for (std::uint32_t exchange = 1; exchange < 50; ++exchange) {
    wait_in_job(1, exchange);
    all_heard(progress_of(0, 0));
    EXPECT_TRUE(watch_.tick(9900ms).notices.empty());
  }
  EXPECT_EQ(watch_.tick(100ms).notices.size(), 1U);  // control: 10 s in the last one
}

TEST_F(WatchTest, NobodyIsWarnedWhileNobodyWaits) {
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(watch_.tick(1s).notices.empty());
  wait_in_job(1, 1);
  watch_.end(WaitKind::kJob);
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(watch_.tick(1s).notices.empty());
}

TEST_F(WatchTest, ANoticeNamesRankTensorPhaseAndJob) {
  wait_in_job(3, 2);
  watch_.heard(Rank{1}, progress_of(3, 2, 2));
  watch_.heard(Rank{2}, progress_of(2, 2, 0));
  watch_.heard(Rank{3}, progress_of(3, 2, 1));
  watch_.tick(8s);
  for (int rank = 1; rank < 3; ++rank) {
    watch_.heard(Rank{rank}, progress_of(rank == 1 ? 3 : 2, 2, 2));
  }
  EXPECT_EQ(notice_after(2500ms),
            "rank 0: waiting in 'push' of tensor 'table' (job 3) for 10 s: rank 2 has not come to "
            "it, its process lives; rank 3 is at an earlier exchange of it, nothing was heard from "
            "its process for 10 s");
}

TEST_F(WatchTest, ANoticeOfADenseAllReduceNamesIt) {
  wait_in_dense(5);
  all_heard(progress_of(0, 0, 0, 5));
  watch_.heard(Rank{3}, progress_of(0, 0, 0, 4));
  watch_.tick(9s);
  all_heard(progress_of(0, 0, 0, 5));
  watch_.heard(Rank{3}, progress_of(0, 0, 0, 4));
  EXPECT_EQ(notice_after(1s),
            "rank 0: waiting in the dense all-reduce of tensor 'bias' for 10 s: rank 3 has not "
            "come to it, its process lives");
}

TEST_F(WatchTest, ANoticeTellsASilentRankFromSlowLinks) {
  wait_in_job(1, 1);
  all_heard(progress_of(1, 0, 1));
  watch_.tick(9s);
  watch_.heard(Rank{1}, progress_of(1, 0, 1));
  watch_.heard(Rank{3}, progress_of(1, 0, 1));
  EXPECT_NE(notice_after(1s).find(": rank 2 does not answer, nothing was heard from its process "
                                  "for 10 s"),
            std::string::npos);
  watch_.tick(9s);
  all_heard(progress_of(1, 0, 1));
  EXPECT_NE(notice_after(1s).find("no rank is behind: the links are slow"), std::string::npos);
}

/// Without control connections nothing is known of anybody: no rank is cleared of being behind.
TEST_F(WatchTest, ANoticeWithoutHeartbeatsSaysThatNobodyKnowsWho) {
  for (int rank = 0; rank < 4; ++rank) watch_.left(Rank{rank}, false);
  wait_in_job(1, 1);
  const std::string job = notice_after(10s);
  EXPECT_NE(job.find(" for 10 s: there are no heartbeats, so it is not known for whom"),
            std::string::npos)
      << job;
  watch_.end(WaitKind::kJob);
  EXPECT_NE(notice_after(1s).find("is over"), std::string::npos);
  wait_in_dense(1);
  EXPECT_NE(notice_after(10s).find("there are no heartbeats"), std::string::npos);
}

TEST_F(WatchTest, AWaitThatWasWarnedOfIsToldToBeOver) {
  wait_in_job(1, 1);
  watch_.tick(10s);
  watch_.tick(2500ms);
  watch_.end(WaitKind::kJob);
  watch_.end(WaitKind::kJob);  // told once
  EXPECT_EQ(notice_after(1s),
            "rank 0: waiting in 'push' of tensor 'table' (job 1) is over after 12 s");
  EXPECT_TRUE(watch_.tick(1s).notices.empty());
}

TEST_F(WatchTest, AWaitThatNobodyWasWarnedOfEndsWithoutAWord) {
  wait_in_job(1, 1);
  watch_.tick(9s);
  watch_.end(WaitKind::kJob);
  EXPECT_TRUE(watch_.tick(1s).notices.empty());
}

TEST_F(WatchTest, AnExchangeAfterTheOneThatWasWarnedOfMeansThatOneIsOver) {
  wait_in_job(1, 1);
  watch_.tick(11s);
  wait_in_job(1, 2);
  EXPECT_NE(notice_after(1s).find("is over after 11 s"), std::string::npos);
}

struct Place {
  const char* what;
  Progress theirs;
  bool behind;
};

TEST_F(WatchTest, BehindIsWhoHasBegunLess) {
  const Place places[] = {
      {"an earlier job", progress_of(4, 4), true},
      {"an earlier job, more exchanges", progress_of(4, 3, 9), true},
      {"this job, no exchange yet", progress_of(5, 4, 0), true},
      {"an earlier exchange", progress_of(5, 4, 1), true},
      {"the same exchange", progress_of(5, 4, 2), false},
      {"a later exchange", progress_of(5, 4, 3), false},
      {"done, after fewer exchanges", progress_of(5, 5, 1), false},
      {"a later job, no exchange yet", progress_of(6, 5, 0), false},
  };
  for (const Place& place : places) {
    wait_in_job(5, 2);
    all_heard(progress_of(5, 4, 2));
    EXPECT_EQ(watch_.behind().value, -1) << place.what;
    watch_.heard(Rank{2}, place.theirs);
    EXPECT_EQ(watch_.behind().value, place.behind ? 2 : -1) << place.what;
    watch_.end(WaitKind::kJob);
    EXPECT_EQ(watch_.behind().value, -1) << place.what << ", but nobody waits";
  }
}

TEST_F(WatchTest, OfManyTheFurthestBehindIsNamed) {
  wait_in_job(5, 2);
  watch_.heard(Rank{1}, progress_of(5, 4, 1));
  watch_.heard(Rank{2}, progress_of(3, 2, 7));
  watch_.heard(Rank{3}, progress_of(4, 3, 1));
  EXPECT_EQ(watch_.behind().value, 2);
  watch_.heard(Rank{2}, progress_of(4, 3, 2));
  EXPECT_EQ(watch_.behind().value, 3);
}

TEST_F(WatchTest, WhoLeftIsNotNamedAsBehind) {
  wait_in_job(5, 2);
  all_heard(progress_of(5, 4, 2));
  watch_.heard(Rank{2}, progress_of(4, 3, 2));
  EXPECT_EQ(watch_.behind().value, 2);
  watch_.left(Rank{2});
  EXPECT_EQ(watch_.behind().value, -1);
}

TEST_F(WatchTest, DenseAllReducesHaveACountOfTheirOwn) {
  wait_in_dense(2);
  all_heard(progress_of(0, 0, 0, 2));
  watch_.heard(Rank{1}, progress_of(9, 9, 0, 1));
  EXPECT_EQ(watch_.behind().value, 1);
  watch_.heard(Rank{1}, progress_of(0, 0, 0, 2));
  EXPECT_EQ(watch_.behind().value, -1);
  watch_.heard(Rank{1}, progress_of(0, 0, 0, 1));
  watch_.end(WaitKind::kDense);
  EXPECT_EQ(watch_.behind().value, -1);
}

TEST_F(WatchTest, SilenceIsAFaultOnlyForThoseWhoWait) {
  for (int second = 0; second < 200; ++second) {
    for (const int rank : {1, 3}) watch_.heard(Rank{rank}, progress_of(0, 0));
    ASSERT_FALSE(watch_.tick(1s).fault.has_value());
  }
  wait_in_job(1, 1);
  const auto fault = watch_.tick(1s).fault;
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->kind, ErrorKind::kPeerLost);
  EXPECT_EQ(fault->rank.value, 0);
  EXPECT_EQ(fault->culprit.value, 2);
  EXPECT_EQ(fault->tensor, "table");
  EXPECT_NE(fault->message.find("for 201 s (silent_after_s)"), std::string::npos) << fault->message;
}

TEST_F(WatchTest, SilenceIsAFaultAtItsLimitInADenseAllReduceToo) {
  wait_in_dense(1);
  for (int second = 1; second <= 60; ++second) {
    for (const int rank : {1, 2}) watch_.heard(Rank{rank}, progress_of(0, 0));
    const auto fault = watch_.tick(1s).fault;
    ASSERT_EQ(fault.has_value(), second == 60) << second;
    if (!fault) continue;
    EXPECT_EQ(fault->culprit.value, 3);
    EXPECT_EQ(fault->tensor, "bias");
  }
}

TEST_F(WatchTest, OneBeatEndsASilence) {
  wait_in_job(1, 1);
  all_heard(progress_of(0, 0));
  for (int round = 0; round < 5; ++round) {
    EXPECT_FALSE(watch_.tick(59900ms).fault.has_value());
    all_heard(progress_of(0, 0));
  }
  watch_.tick(59900ms);
  EXPECT_TRUE(watch_.tick(100ms).fault.has_value());
}

/// The caller hands over two beats at most for a tick, however long this process stood still.
TEST_F(WatchTest, OnlyTheTimeThatWasHandedOverCounts) {
  wait_in_job(1, 1);
  all_heard(progress_of(0, 0));
  int ticks = 0;
  while (!watch_.tick(2s).fault && ticks < 1000) ++ticks;
  EXPECT_EQ(ticks, 29);
}

TEST_F(WatchTest, WhoLeftIsNeitherSilentNorNamedInNotices) {
  wait_in_job(1, 1);
  watch_.left(Rank{2});
  EXPECT_TRUE(watch_.has_left(Rank{2}));
  EXPECT_FALSE(watch_.has_left(Rank{1}));
  for (int second = 1; second <= 100; ++second) {
    for (const int rank : {1, 3}) watch_.heard(Rank{rank}, progress_of(1, 0, 1));
    const Watch::Verdict verdict = watch_.tick(1s);
    EXPECT_FALSE(verdict.fault.has_value());
    for (const std::string& text : verdict.notices) {
      EXPECT_EQ(text.find("rank 2"), std::string::npos) << text;
    }
  }
}

TEST_F(WatchTest, WhoLeftIsMissedOnlyByAJobItHadNotDone) {
  watch_.heard(Rank{2}, progress_of(4, 4));
  EXPECT_FALSE(watch_.missed_by(Rank{2}).has_value());
  watch_.own() = progress_of(5, 4);  // begun, waits for nobody yet
  watch_.left(Rank{2});
  EXPECT_FALSE(watch_.missed_by(Rank{2}).has_value());
  wait_in_job(4, 1);
  EXPECT_FALSE(watch_.missed_by(Rank{2}).has_value());  // it has done its part of job 4
  wait_in_job(5, 1);
  EXPECT_FALSE(watch_.missed_by(Rank{1}).has_value());  // has not left
  const auto missed = watch_.missed_by(Rank{2});
  ASSERT_TRUE(missed.has_value());
  EXPECT_EQ(missed->kind, ErrorKind::kPeerLost);
  EXPECT_EQ(missed->rank.value, 0);
  EXPECT_EQ(missed->culprit.value, 2);
  EXPECT_EQ(missed->tensor, "table");
  watch_.end(WaitKind::kJob);
  EXPECT_FALSE(watch_.missed_by(Rank{2}).has_value());
}

TEST_F(WatchTest, WhoLeftIsMissedByADenseAllReduceItHadNotBegun) {
  watch_.heard(Rank{2}, progress_of(4, 4, 1, 6));
  watch_.left(Rank{2});
  watch_.own() = progress_of(4, 4, 1, 5);
  wait_in_dense(6);
  EXPECT_FALSE(watch_.missed_by(Rank{2}).has_value());  // it has begun its part
  watch_.end(WaitKind::kDense);
  wait_in_dense(7);
  const auto missed = watch_.missed_by(Rank{2});
  ASSERT_TRUE(missed.has_value());
  EXPECT_EQ(missed->culprit.value, 2);
  watch_.left(Rank{2}, false);  // lost: that is told with its own reason
  EXPECT_FALSE(watch_.missed_by(Rank{2}).has_value());
}

/// Two waits at once: a job of the engine and a dense all-reduce of the caller.
TEST_F(WatchTest, BothWaitsAreWatched) {
  wait_in_job(1, 1);
  watch_.tick(4s);
  wait_in_dense(1);
  all_heard(progress_of(1, 0, 1, 0));
  EXPECT_EQ(watch_.behind().value, 1);
  EXPECT_NE(notice_after(6s).find("'push'"), std::string::npos);
  watch_.end(WaitKind::kJob);
  EXPECT_NE(notice_after(1s).find("'push' of tensor 'table' (job 1) is over"), std::string::npos);
  EXPECT_NE(notice_after(3s).find("the dense all-reduce"), std::string::npos);
}

/// A tensor without a name leaves no empty quotes behind.
TEST_F(WatchTest, ATensorMayHaveNoName) {
  wait_in_job(1, 1, "");
  all_heard(progress_of(1, 0, 1));
  EXPECT_EQ(notice_after(10s).find("tensor"), std::string::npos);
}

}  // namespace
}  // namespace zensync::driver
