// One job, as Python sees it. Place: python, level 6. Thread rules: as Job; `wait` releases the
// GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "zensync/engine/engine.hpp"

namespace zensync::python {

class JobHandle {
 public:
  explicit JobHandle(std::shared_ptr<Job> job) : job_(std::move(job)) {}
  Job& job() const { return *job_; }

 private:
  std::shared_ptr<Job> job_;
};

/// A report as a dict: scheme, width, units, union_units, sent_bytes, received_bytes,
/// chunk_ends, seconds; of a reduce-scatter also layout, owner_units and imbalance.
nanobind::dict to_dict(const JobReport& report);

void bind_job(nanobind::module_& module);

}  // namespace zensync::python
