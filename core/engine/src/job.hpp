// The state of one job. Place: engine, internal. Written by the engine's thread until it has ended,
// then read by anyone; `done` and the condition variable order the two.
#pragma once

#include <condition_variable>
#include <mutex>

#include "zensync/engine/engine.hpp"

namespace zensync {

class JobState final : public Job {
 public:
  JobSpec spec;                  ///< of a tensor's job
  std::vector<DenseItem> items;  ///< of an agreement
  bool is_agreement = false;

  bool wait_until(Clock::time_point until) override {
    std::unique_lock lock(mutex_);
    return ended_.wait_until(lock, until, [this] { return done_; });
  }
  bool done() const override {
    std::lock_guard lock(mutex_);
    return done_;
  }
  const Status& status() const override { return status_; }
  Outcome outcome() const override { return result.outcome; }
  const JobReport& report() const override { return result.report; }
  std::span<const std::int64_t> result_rows() const override { return sink.rows().span(); }
  std::span<const std::byte> result_values() const override { return sink.values().bytes(); }

  void end(Status status) {
    {
      std::lock_guard lock(mutex_);
      status_ = std::move(status);
      done_ = true;
    }
    ended_.notify_all();
  }

  struct Ending {
    Outcome outcome = Outcome::kDone;
    JobReport report;
  };
  Ending result;
  UnitSink sink;

 private:
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  Status status_;
};

}  // namespace zensync
