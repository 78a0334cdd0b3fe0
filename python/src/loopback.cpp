// `loopback_sum`: n engines over counting(loopback) in this process, no torch. Place: python, level
// 6. Copies its inputs, so the caller's arrays stay as they are; the GIL is released while jobs
// run.
#include "loopback.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "errors.hpp"
#include "job.hpp"
#include "options.hpp"
#include "zensync/base/buffer.hpp"
#include "zensync/driver/counting.hpp"
#include "zensync/driver/loopback.hpp"

namespace nb = nanobind;

namespace zensync::python {
namespace {

using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
constexpr double kLongestWaitSeconds = 600;

// What one rank contributes, and the shape of what it gets back.
struct RankInput {
  TensorSpec spec;
  std::vector<std::int64_t> indices;  // COO only
  Buffer values;
  std::vector<std::size_t> row_shape;  // of one row; empty: rows are single elements
};

struct LoopbackOptions {
  OpenOptions open;
  std::string name = "tensor";
  ReduceOp op = ReduceOp::kSum;
  bool allow_dense = false;
  bool starts_dense = false;
  bool bf16 = false;       // uint16 arrays hold bfloat16
  std::uint64_t rows = 0;  // of COO tensors
  int steps = 1;
  std::vector<int> hosts;  // host of each rank; empty: every rank a host of its own
};

// What came of one rank in one step.
struct RankOutput {
  std::shared_ptr<Job> job;
  Buffer values;  // dense: the caller's memory after the job
  WireCount wire;
};

template <class T>
void take(nb::dict& options, const char* key, T& value) {
  if (!options.contains(key)) return;
  value = nb::cast<T>(options[key]);
  nb::del(options[key]);
}

Result<LoopbackOptions> parse(const nb::dict& given) {
  nb::dict rest;
  for (auto [key, value] : given) rest[key] = value;
  LoopbackOptions parsed;
  std::string op = "sum";
  std::string dtype;
  take(rest, "name", parsed.name);
  take(rest, "op", op);
  take(rest, "dtype", dtype);
  take(rest, "allow_dense", parsed.allow_dense);
  take(rest, "starts_dense", parsed.starts_dense);
  take(rest, "rows", parsed.rows);
  take(rest, "steps", parsed.steps);
  take(rest, "hosts", parsed.hosts);
  if (op != "sum" && op != "avg") return make_error(ErrorKind::kInvalid, "op must be sum or avg");
  if (!dtype.empty() && dtype != "bfloat16") {
    return make_error(ErrorKind::kInvalid, "dtype is only given for bfloat16 (as uint16 arrays)");
  }
  parsed.op = op == "avg" ? ReduceOp::kAvg : ReduceOp::kSum;
  parsed.bf16 = dtype == "bfloat16";
  Result<OpenOptions> open = parse_options(rest);
  if (!open.ok()) return open.error();
  parsed.open = open.value();
  return parsed;
}

Result<DType> dtype_of(const AnyArray& array, bool bf16) {
  const nb::dlpack::dtype type = array.dtype();
  if (bf16 && type == nb::dtype<std::uint16_t>()) return DType::kBF16;
  if (type == nb::dtype<float>()) return DType::kF32;
  if (type == nb::dtype<double>()) return DType::kF64;
  if (type == nb::dtype<std::int32_t>()) return DType::kI32;
  if (type == nb::dtype<std::int64_t>()) return DType::kI64;
  if (type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float) && type.bits == 16) {
    return DType::kF16;
  }
  return make_error(ErrorKind::kUnsupported,
                    "arrays must be float32, float64, float16, int32, "
                    "int64, or uint16 with dtype=\"bfloat16\"");
}

nb::dlpack::dtype dlpack_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return nb::dtype<float>();
    case DType::kF64:
      return nb::dtype<double>();
    case DType::kI32:
      return nb::dtype<std::int32_t>();
    case DType::kI64:
      return nb::dtype<std::int64_t>();
    case DType::kBF16:
      return nb::dtype<std::uint16_t>();
    case DType::kF16:
      break;
  }
  return {static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
}

// One rank's array, or (indices, values).
Result<RankInput> read_input(nb::handle given, const LoopbackOptions& options) {
  RankInput input;
  const bool coo = nb::isinstance<nb::tuple>(given);
  const auto values = nb::cast<AnyArray>(coo ? nb::handle(given[1].ptr()) : given);
  const Result<DType> dtype = dtype_of(values, options.bf16);
  if (!dtype.ok()) return dtype.error();
  input.spec.dtype = dtype.value();
  input.spec.layout = coo ? Layout::kCoo : Layout::kDense;
  if (values.ndim() < 1) return make_error(ErrorKind::kInvalid, "arrays need at least one axis");
  input.spec.rows = coo ? options.rows : values.shape(0);
  for (std::size_t axis = 1; axis < values.ndim(); ++axis) {
    input.row_shape.push_back(values.shape(axis));
    input.spec.row_elems *= values.shape(axis);
  }
  input.values.append(values.data(), values.nbytes());
  if (coo) {
    const auto indices =
        nb::cast<nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(
            given[0]);
    if (indices.shape(0) != values.shape(0)) {
      return make_error(ErrorKind::kInvalid, "indices and values must have equal lengths");
    }
    input.indices.assign(indices.data(), indices.data() + indices.size());
  }
  return input;
}

JobSpec job_of(const RankInput& input, RankOutput& output, const LoopbackOptions& options) {
  JobSpec spec{options.name, DenseView{}, options.op, options.allow_dense, options.starts_dense};
  if (input.spec.layout == Layout::kCoo) {
    spec.input = CooView{input.indices.data(), input.values.data(),  input.indices.size(),
                         input.spec.rows,      input.spec.row_elems, input.spec.dtype};
    return spec;
  }
  output.values.append(input.values.data(), input.values.size());
  spec.input = DenseView{output.values.data(), input.spec.rows, input.spec.row_elems,
                         input.spec.dtype,     nullptr,         0};
  return spec;
}

Topology topology_of(int size, const std::vector<int>& hosts) {
  if (hosts.size() != static_cast<std::size_t>(size)) return flat_topology(size);
  Topology topology;
  for (int rank = 0; rank < size; ++rank) {
    int local_rank = 0;
    for (int other = 0; other < rank; ++other) local_rank += hosts[other] == hosts[rank] ? 1 : 0;
    topology.places.push_back({hosts[rank], local_rank});
  }
  return topology;
}

// Runs all steps; outputs[step][rank].
std::vector<std::vector<RankOutput>> run_steps(const std::vector<RankInput>& inputs,
                                               const LoopbackOptions& options) {
  const int size = static_cast<int>(inputs.size());
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto& driver : make_loopback(size, topology_of(size, options.hosts))) {
    engines.push_back(make_engine(make_counting(std::move(driver)), options.open.engine));
  }
  std::vector<std::vector<RankOutput>> outputs(static_cast<std::size_t>(options.steps));
  for (auto& step : outputs) {
    step.resize(inputs.size());
    for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
      step[rank].job = engines[rank]->submit(job_of(inputs[rank], step[rank], options));
    }
    const auto until = Clock::now() + to_milliseconds(kLongestWaitSeconds);
    for (auto& output : step) static_cast<void>(output.job->wait_until(until));
    for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
      step[rank].wire = engines[rank]->wire_count();
    }
  }
  for (auto& engine : engines) engine->close(to_milliseconds(10));
  return outputs;
}

// A NumPy array that owns a copy of `bytes`.
nb::object to_array(std::span<const std::byte> bytes, std::vector<std::size_t> shape, DType dtype) {
  auto* memory = new std::byte[bytes.size() + 1];
  if (!bytes.empty()) std::memcpy(memory, bytes.data(), bytes.size());
  nb::capsule owner(memory, [](void* data) noexcept { delete[] static_cast<std::byte*>(data); });
  return nb::cast(
      nb::ndarray<nb::numpy>(memory, shape.size(), shape.data(), owner, nullptr, dlpack_of(dtype)));
}

nb::object result_of(const RankInput& input, const RankOutput& output) {
  const Job& job = *output.job;
  std::vector<std::size_t> shape{input.spec.rows};
  shape.insert(shape.end(), input.row_shape.begin(), input.row_shape.end());
  if (input.spec.layout == Layout::kDense) {
    return to_array(output.values.bytes(), shape, input.spec.dtype);
  }
  const auto rows = job.result_rows();
  shape.front() = rows.size();
  return nb::make_tuple(to_array(std::as_bytes(rows), {rows.size()}, DType::kI64),
                        to_array(job.result_values(), shape, input.spec.dtype));
}

// {results, sent_bytes, received_bytes, reports, outcomes, errors, steps}: lists by rank of the
// last step; sent_bytes and received_bytes are that step's; `reports_by_step` has every step's.
nb::dict to_dict_of_lists(const std::vector<RankInput>& inputs,
                          const std::vector<std::vector<RankOutput>>& outputs) {
  nb::list results, sent, received, outcomes, errors, by_step;
  for (const auto& step : outputs) {
    nb::list reports;
    for (const auto& output : step) {
      reports.append(output.job->done() ? nb::object(to_dict(output.job->report())) : nb::none());
    }
    by_step.append(reports);
  }
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    const RankOutput& last = outputs.back()[rank];
    const bool later = outputs.size() > 1;
    const WireCount before = later ? outputs[outputs.size() - 2][rank].wire : WireCount{};
    sent.append(last.wire.sent_bytes - before.sent_bytes);
    received.append(last.wire.received_bytes - before.received_bytes);
    const bool done = last.job->done();
    const Status status =
        done ? last.job->status() : Status(make_error(ErrorKind::kDeadline, "the job did not end"));
    errors.append(to_object(status));
    outcomes.append(status.ok() ? nb::cast(last.job->outcome()) : nb::none());
    results.append(status.ok() ? result_of(inputs[rank], last) : nb::none());
  }
  nb::dict result;
  result["results"] = results;
  result["sent_bytes"] = sent;
  result["received_bytes"] = received;
  result["outcomes"] = outcomes;
  result["errors"] = errors;
  result["reports"] = by_step[by_step.size() - 1];
  result["reports_by_step"] = by_step;
  return result;
}

// inputs: one array, or (indices, values), per rank. An ErrorInfo when arguments do not fit.
nb::object loopback_sum(const nb::list& given, const nb::dict& options) {
  const Result<LoopbackOptions> parsed = parse(options);
  if (!parsed.ok()) return to_object(parsed.status());
  if (given.size() == 0 || parsed.value().steps < 1) {
    return to_object(make_error(ErrorKind::kInvalid, "at least one rank and one step are needed"));
  }
  std::vector<RankInput> inputs;
  for (nb::handle one : given) {
    Result<RankInput> input = read_input(one, parsed.value());
    if (!input.ok()) return to_object(input.status());
    inputs.push_back(std::move(input.value()));
  }
  std::vector<std::vector<RankOutput>> outputs;
  {
    nb::gil_scoped_release release;
    outputs = run_steps(inputs, parsed.value());
  }
  return to_dict_of_lists(inputs, outputs);
}

}  // namespace

void bind_loopback(nb::module_& module) {
  module.def("loopback_sum", &loopback_sum, nb::arg("inputs"), nb::arg("options"));
}

}  // namespace zensync::python
