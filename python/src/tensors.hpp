// Tensors as Python hands them over: pointers and shapes, no memory. Place: python, level 6.
// Whoever makes one keeps the memory alive, and does not touch it, until its job has ended.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "zensync/engine/engine.hpp"

namespace zensync::python {

struct DenseTensor {
  std::uintptr_t data = 0;
  TensorSpec spec;
  std::uintptr_t ids = 0;  ///< int64, ascending, distinct; 0: scan
  std::uint64_t ids_count = 0;
};

struct CooTensor {
  std::uintptr_t indices = 0;
  std::uintptr_t values = 0;
  std::uint64_t entries = 0;
  TensorSpec spec;
};

struct JobOptions {
  std::string name;
  ReduceOp op = ReduceOp::kSum;
  bool allow_dense = true;
  bool starts_dense = false;
};

JobSpec to_job(const DenseTensor& tensor, const JobOptions& options);
JobSpec to_job(const CooTensor& tensor, const JobOptions& options);

void bind_tensors(nanobind::module_& module);

}  // namespace zensync::python
