// Damaged messages in every scheme: one received message is flipped, cut, lengthened or replaced.
// With digests on the receiver reports it; with digests off it reports or goes on, but never
// crashes or hangs (run with ASan). Place: tests of the engine. The damage is done by a decorator
// round the driver of rank 0.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "group.hpp"

namespace zensync::test {
namespace {

enum class Damage { kNone, kFlip, kCut, kLengthen, kReplace };

struct DamagePlan {
  Damage kind = Damage::kNone;
  int message = 0;         ///< which received message, counted from 0
  std::size_t at = 0;      ///< byte (flip), length (cut), seed (replace)
  unsigned mask = 0;       ///< bits to flip; 0: one, which depends on `at`
  bool was_done = false;   ///< set when the message came and was long enough
  std::size_t length = 0;  ///< of that message
};

class DamagingDriver final : public Driver {
 public:
  DamagingDriver(std::unique_ptr<Driver> inner, DamagePlan& plan)
      : inner_(std::move(inner)), plan_(plan) {}
  Rank rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const Topology& topology() const override { return inner_->topology(); }
  std::string name() const override { return "damaging " + inner_->name(); }
  Status exchange(const Exchange& exchange, Clock::time_point deadline) override {
    Status status = inner_->exchange(exchange, deadline);
    if (!status.ok() || rank().value != 0) return status;
    for (const Recv& recv : exchange.recvs) {
      if (seen_++ == plan_.message) damage(*recv.into);
    }
    return status;
  }
  Status flush(Clock::time_point deadline) override { return inner_->flush(deadline); }
  void abort(const Error& why) override { inner_->abort(why); }
  WireCount wire_count() const override { return inner_->wire_count(); }

 private:
  void damage(Buffer& message) {
    plan_.length = message.size();
    if (plan_.kind == Damage::kNone ||
        (plan_.kind != Damage::kReplace && plan_.at >= plan_.length)) {
      return;
    }
    plan_.was_done = true;
    const unsigned mask = plan_.mask != 0 ? plan_.mask : 1U << (plan_.at % 8);
    if (plan_.kind == Damage::kFlip) message.data()[plan_.at] ^= static_cast<std::byte>(mask);
    if (plan_.kind == Damage::kCut) message.resize_keep(plan_.at);
    if (plan_.kind == Damage::kLengthen) message.append("surplus", 1 + plan_.at % 7);
    for (std::size_t i = 0; plan_.kind == Damage::kReplace && i < message.size(); ++i) {
      message.data()[i] = static_cast<std::byte>(mix64(plan_.at * 1000 + i));
    }
  }
  std::unique_ptr<Driver> inner_;
  DamagePlan& plan_;
  int seen_ = 0;
};

class Hostile : public ::testing::TestWithParam<SchemeId> {
 protected:
  Case small_job() const {
    CaseSpec spec{3, DType::kF32, Storage::kDense, 300, 1, Pattern::kUniform};
    spec.density = 0.15;
    return make_case(spec);
  }

  /// Runs one job with `plan`; false if it did not end in time. `status` is rank 0's.
  bool run(DamagePlan& plan, bool verify, Status& status) {
    EngineOptions options = options_of(GetParam());
    options.wire.verify = verify;
    Case job = small_job();
    Group group(3, options, [&plan](std::unique_ptr<Driver> driver) {
      return std::make_unique<DamagingDriver>(std::move(driver), plan);
    });
    Jobs jobs;
    if (!group.run(job, "t", jobs)) return false;
    status = jobs[0]->status();
    return true;
  }

  /// Damages each message of the job in all places that `kind` knows.
  template <class Check>
  void for_each_damage(Damage kind, bool verify, Check check, unsigned mask = 0) {
    for (int message = 0;; ++message) {
      DamagePlan probe{Damage::kNone, message};
      Status status;
      ASSERT_TRUE(run(probe, verify, status));
      if (probe.length == 0) break;
      const std::size_t places = kind == Damage::kReplace ? 20 : probe.length;
      for (std::size_t at = 0; at < places; ++at) {
        DamagePlan plan{kind, message, at, mask};
        ASSERT_TRUE(run(plan, verify, status));
        ASSERT_TRUE(plan.was_done);
        ASSERT_NO_FATAL_FAILURE(check(status, message, at));
      }
    }
  }
};

constexpr unsigned kMasks[] = {0x01, 0x80, 0xFF};

void expect_found(const Status& status, const std::string& where) {
  ASSERT_FALSE(status.ok()) << where;
  EXPECT_GE(status.error().culprit.value, 1) << status.error().message;
  const ErrorKind kind = status.error().kind;
  EXPECT_TRUE(kind == ErrorKind::kCorruptMessage || kind == ErrorKind::kMismatch)
      << status.error().message;
}

/// Header, job header, values, index and the digest itself.
TEST_P(Hostile, DigestsFindEveryFlippedByte) {
  for (const unsigned mask : kMasks) {
    const auto check = [mask](const Status& status, int message, std::size_t at) {
      std::string where = "message " + std::to_string(message) + " byte " + std::to_string(at);
      expect_found(status, where += " mask " + std::to_string(mask));
    };
    for_each_damage(Damage::kFlip, true, check, mask);
  }
}

TEST_P(Hostile, WithoutDigestsNothingCrashes) {
  int refused = 0;
  for_each_damage(Damage::kFlip, false,
                  [&](const Status& status, int, std::size_t) { refused += !status.ok(); });
  EXPECT_GT(refused, 0);
}

TEST_P(Hostile, CutMessagesAreRefused) {
  for (bool verify : {true, false}) {
    for_each_damage(Damage::kCut, verify, [](const Status& status, int message, std::size_t at) {
      ASSERT_FALSE(status.ok()) << "message " << message << " cut to " << at;
    });
  }
}

TEST_P(Hostile, LongerAndReplacedMessagesAreRefused) {
  for (Damage kind : {Damage::kLengthen, Damage::kReplace}) {
    for (bool verify : {true, false}) {
      for_each_damage(kind, verify, [](const Status& status, int message, std::size_t) {
        ASSERT_FALSE(status.ok()) << "message " << message;
      });
    }
  }
}

/// Control: without damage the same jobs end well.
TEST_P(Hostile, ControlUndamagedJobsEndWell) {
  DamagePlan plan;
  Status status;
  ASSERT_TRUE(run(plan, true, status));
  EXPECT_TRUE(status.ok());
  EXPECT_GT(plan.length, 48U);
}

/// The same for the headers of an agreement; the last round is whole, as a control.
TEST(HostileAgreement, DigestsFindEveryFlippedByte) {
  const std::vector<DenseItem> items(
      2, {"t", {300, 1, DType::kF32, Layout::kDense}, nullptr, ReduceOp::kSum, false});
  constexpr std::size_t kBytes = 48 + 2 * 64;
  for (int message = 0; message < 2; ++message) {
    for (std::size_t i = 0; i <= kBytes * std::size(kMasks); ++i) {
      const bool whole = i == kBytes * std::size(kMasks);
      DamagePlan plan{whole ? Damage::kNone : Damage::kFlip, message, i / std::size(kMasks)};
      plan.mask = kMasks[i % std::size(kMasks)];
      Group group(3, {}, [&plan](std::unique_ptr<Driver> driver) {
        return std::make_unique<DamagingDriver>(std::move(driver), plan);
      });
      Jobs jobs;
      for (int rank = 0; rank < 3; ++rank) jobs.push_back(group.engine(rank).agree(items));
      ASSERT_TRUE(wait_all(jobs));
      ASSERT_EQ(plan.length, kBytes);
      if (whole) {
        EXPECT_TRUE(jobs[0]->status().ok());
      } else {
        ASSERT_NO_FATAL_FAILURE(expect_found(jobs[0]->status(), "byte " + std::to_string(plan.at)));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Hostile, ::testing::ValuesIn(kSchemes),
                         [](const auto& given) { return std::string(scheme_name(given.param)); });

}  // namespace
}  // namespace zensync::test
