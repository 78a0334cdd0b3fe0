// Runs jobs one after another on the calling thread: plan, scheme, driver, what is remembered.
// Place: engine, internal; used by the engine's thread only, but for `would_be_dense`, which takes
// a lock.
#pragma once

#include <map>
#include <mutex>
#include <span>

#include "job.hpp"
#include "prepare.hpp"
#include "zensync/engine/engine.hpp"

namespace zensync {

class Runner {
 public:
  /// control: may be null; is told what this rank waits in.
  Runner(Driver& driver, const EngineOptions& options, Control* control);
  /// Runs one job to its end; an error is final for the driver too.
  Status run(JobState& job);
  bool would_be_dense(const std::string& name, const TensorSpec& spec, bool starts_dense);

 private:
  struct Known {
    TensorSpec spec;
    TensorState state;
  };
  Status run_tensor(JobState& job);
  Status run_agreement(JobState& job);
  Status run_sparse(JobState& job, SchemeContext& context);
  Status run_dense(JobState& job, const TensorSpec& spec);
  Result<std::uint64_t> check_shard(const JobSpec& job) const;
  Status run_shard(JobState& job);
  Status agree_on(const std::vector<JobHeader>& headers, const std::vector<std::string>& names,
                  std::vector<std::vector<JobHeader>>& theirs);
  /// own: what this rank says of the job, to find out who differs if somebody does.
  Status drive(SchemeTask& task, std::span<const JobHeader> own);
  Status late(Status status) const;
  SchemeContext context_of(const std::string& name, const TensorSpec& spec, ReduceOp op);
  JobHeader header_of(const std::string& name, const TensorSpec& spec, ReduceOp op) const;
  /// State of a tensor; a tensor whose shape or dtype changed starts anew.
  TensorState& known(const std::string& name, const TensorSpec& spec, bool starts_dense);
  void remember_dense(const std::vector<DenseItem>& items,
                      const std::vector<std::vector<JobHeader>>& theirs);

  Driver& driver_;
  Control* control_;
  EngineOptions options_;
  PlanOptions plan_options_;
  const kernels::Table& table_;
  Workspace workspace_;
  Preparer preparer_;
  Clock::time_point deadline_;
  std::uint32_t sequence_ = 0;
  std::mutex known_mutex_;
  std::map<std::string, Known> known_;
};

}  // namespace zensync
