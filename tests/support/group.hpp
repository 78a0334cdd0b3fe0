// n engines over the loopback in one process, with bounded waits. Place: tests/support.
// A Group owns its engines and closes them within a bound; a job that does not end in time is a
// failed test, never a hang. Drivers are wrapped in the counting one, and in another if the test
// asks for it.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cases.hpp"
#include "zensync/driver/counting.hpp"
#include "zensync/driver/loopback.hpp"
#include "zensync/engine/engine.hpp"

namespace zensync::test {

using Jobs = std::vector<std::shared_ptr<Job>>;
using Wrap = std::function<std::unique_ptr<Driver>(std::unique_ptr<Driver>)>;
using std::chrono::milliseconds;

/// Generous: sanitizers and busy machines are slow; only a hang takes as long.
inline constexpr milliseconds kPatience{30000};

inline bool wait_all(const Jobs& jobs, milliseconds patience = kPatience) {
  const auto until = Clock::now() + patience;
  for (const auto& job : jobs) {
    if (!job->wait_until(until)) return false;
  }
  return true;
}

class Group {
 public:
  explicit Group(int size, EngineOptions options = {}, const Wrap& wrap = {}) {
    for (auto& driver : make_loopback(size)) {
      auto counted = make_counting(std::move(driver));
      engines_.push_back(
          make_engine(wrap ? wrap(std::move(counted)) : std::move(counted), options));
    }
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() { close(); }

  int size() const { return static_cast<int>(engines_.size()); }
  Engine& engine(int rank) { return *engines_[static_cast<std::size_t>(rank)]; }
  void close() {
    for (auto& engine : engines_) engine->close(milliseconds(2000));
  }

  /// Submits `job` on every rank.
  Jobs submit(Case& job, const std::string& name) {
    Jobs jobs;
    for (int rank = 0; rank < size(); ++rank)
      jobs.push_back(engine(rank).submit(job_of(job, rank, name)));
    return jobs;
  }
  /// Runs `job` on every rank; false, with a failure noted, if it does not end in time.
  bool run(Case& job, const std::string& name, Jobs& jobs) {
    jobs = submit(job, name);
    if (wait_all(jobs)) return true;
    ADD_FAILURE() << "does not end: " << label(job.spec);
    engine(0).abort(make_error(ErrorKind::kDeadline, "the test gives up"));
    return false;
  }

 private:
  std::vector<std::unique_ptr<Engine>> engines_;
};

/// The schemes that have code of ours.
inline constexpr SchemeId kSchemes[] = {SchemeId::kBalanced, SchemeId::kRecursiveDoubling,
                                        SchemeId::kAgSparse, SchemeId::kDenseRing};
inline constexpr SchemeId kSparseSchemes[] = {SchemeId::kBalanced, SchemeId::kRecursiveDoubling,
                                              SchemeId::kAgSparse};
inline constexpr IndexCodec kPolicies[] = {IndexCodec::kBlocks, IndexCodec::kRaw32,
                                           IndexCodec::kBitmap, IndexCodec::kEliasFano};

inline EngineOptions options_of(SchemeId scheme) {
  EngineOptions options;
  options.scheme = scheme;
  return options;
}

/// Runs `job` under `options` in fresh engines and expects `expected` on every rank.
inline void expect_sum(Case job, const EngineOptions& options, const Sum& expected) {
  Group group(job.spec.size, options);
  Jobs jobs;
  ASSERT_TRUE(group.run(job, "tensor", jobs));
  for (int rank = 0; rank < group.size(); ++rank) {
    EXPECT_TRUE(holds(job, rank, *jobs[static_cast<std::size_t>(rank)], expected))
        << scheme_name(options.scheme) << " " << label(job.spec) << " rank " << rank;
  }
}

/// Rank 1 of two submits `wrong`, rank 0 what it should; both errors.
inline std::vector<Error> errors_of(const JobSpec& right, const JobSpec& wrong) {
  Group group(2);
  const Jobs jobs = {group.engine(0).submit(right), group.engine(1).submit(wrong)};
  EXPECT_TRUE(wait_all(jobs)) << "a hang";
  std::vector<Error> errors;
  for (const auto& job : jobs) {
    EXPECT_FALSE(job->status().ok());
    errors.push_back(job->status().ok() ? Error() : job->status().error());
  }
  return errors;
}

}  // namespace zensync::test
