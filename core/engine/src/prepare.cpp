// Checking and preparing inputs. Place: engine. Rows are checked in one pass each, before anything
// is sent.
#include "prepare.hpp"

#include <limits>

namespace zensync {
namespace {

Error invalid(const std::string& what) { return make_error(ErrorKind::kInvalid, what); }

Status check_size(const TensorSpec& spec) {
  constexpr std::uint64_t kMost = 1ULL << 62;
  if (spec.row_elems != 0 && spec.rows > kMost / 8 / spec.row_elems) {
    return invalid("a tensor of " + std::to_string(spec.rows) + " x " +
                   std::to_string(spec.row_elems) + " elements is beyond 2^59 elements");
  }
  return {};
}

Status check_rows(const std::int64_t* rows, std::uint64_t count, std::uint64_t limit, bool ascend) {
  std::int64_t next = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    if (rows[i] < 0 || static_cast<std::uint64_t>(rows[i]) >= limit) {
      return invalid("row " + std::to_string(rows[i]) + " (entry " + std::to_string(i) +
                     ") is outside the tensor's " + std::to_string(limit) + " rows");
    }
    if (ascend && rows[i] < next) {
      return invalid("rows must ascend strictly; entry " + std::to_string(i) + " is " +
                     std::to_string(rows[i]));
    }
    next = rows[i] + 1;
  }
  return {};
}

bool ascends(const std::int64_t* rows, std::uint64_t count) {
  for (std::uint64_t i = 1; i < count; ++i) {
    if (rows[i] <= rows[i - 1]) return false;
  }
  return true;
}

}  // namespace

TensorSpec spec_of(const JobSpec& job) {
  if (const auto* dense = std::get_if<DenseView>(&job.input)) {
    return {dense->rows, dense->row_elems, dense->dtype, Layout::kDense};
  }
  const auto& coo = std::get<CooView>(job.input);
  return {coo.rows, coo.row_elems, coo.dtype, Layout::kCoo};
}

Status check_output(const void* data, std::uint64_t bytes, const DenseView& input) {
  if (bytes == 0) return {};
  if (data == nullptr) return invalid("the output has no memory");
  const auto out = reinterpret_cast<std::uintptr_t>(data);
  const auto in = reinterpret_cast<std::uintptr_t>(input.data);
  const std::uint64_t in_bytes = input.rows * input.row_elems * dtype_bytes(input.dtype);
  if (out < in + in_bytes && in < out + bytes) return invalid("output and input share memory");
  return {};
}

Status Preparer::check(const JobSpec& job) const {
  const TensorSpec spec = spec_of(job);
  if (!is_valid(spec.dtype)) return invalid("unknown dtype");
  if (job.op == ReduceOp::kAvg && !is_float(spec.dtype)) {
    return make_error(ErrorKind::kUnsupported, "AVG of integers is not defined; use SUM");
  }
  if (Status status = check_size(spec); !status.ok()) return status;
  if (const auto* dense = std::get_if<DenseView>(&job.input)) {
    if (dense->data == nullptr && spec.elems() != 0) return invalid("the tensor has no memory");
    return dense->ids == nullptr ? Status()
                                 : check_rows(dense->ids, dense->ids_count, dense->rows, true);
  }
  const auto& coo = std::get<CooView>(job.input);
  if (coo.entries != 0 &&
      (coo.indices == nullptr || (coo.values == nullptr && coo.row_elems != 0))) {
    return invalid("the COO tensor has entries but no memory");
  }
  if (coo.entries > std::numeric_limits<std::uint32_t>::max()) {
    return make_error(ErrorKind::kCapacity, "more than 2^32 entries in one COO tensor");
  }
  return check_rows(coo.indices, coo.entries, coo.rows, false);
}

UnitSource Preparer::source(const JobSpec& job, std::uint64_t width) {
  if (const auto* coo = std::get_if<CooView>(&job.input)) return coo_source(*coo, width);
  const auto& dense = std::get<DenseView>(job.input);
  if (dense.ids == nullptr) return UnitSource::scanned(dense.data, width, dense.dtype);
  const auto* ids = reinterpret_cast<const std::uint64_t*>(dense.ids);
  return UnitSource::listed(dense.data, {ids, dense.ids_count, dense.row_elems / width}, width,
                            dense.dtype, true);
}

UnitSource Preparer::coo_source(const CooView& view, std::uint64_t width) {
  const std::uint64_t parts = view.row_elems / width;
  const auto* indices = reinterpret_cast<const std::uint64_t*>(view.indices);
  if (ascends(view.indices, view.entries)) {
    return UnitSource::listed(view.values, {indices, view.entries, parts}, width, view.dtype,
                              false);
  }
  const std::span<const std::int64_t> rows(view.indices, view.entries);
  kernels::coalesce(table_, {rows, view.values, view.row_elems, view.dtype}, scratch_, rows_,
                    sums_);
  return UnitSource::listed(sums_.data(), {rows_.data(), rows_.size(), parts}, width,
                            sum_dtype(view.dtype), false);
}

}  // namespace zensync
