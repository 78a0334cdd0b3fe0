// One job, as Python sees it; see job.hpp. Place: python, level 6.
// Results are read only after the end, so nothing here waits but `wait`.
#include "job.hpp"

#include <nanobind/stl/string.h>

#include <cstring>
#include <string>

#include "errors.hpp"
#include "options.hpp"

namespace nb = nanobind;

namespace zensync::python {
namespace {

// Callers ask for results only after `done`; before it there is nothing to read.
void require_done(const JobHandle& self) {
  if (!self.job().done()) throw nb::value_error("the job has not ended");
}

bool wait(const JobHandle& self, double timeout_s) {
  nb::gil_scoped_release release;
  return self.job().wait_until(Clock::now() + to_milliseconds(timeout_s));
}

// Copies rows (int64[entries]) and values to memory of the caller's.
void copy_result(const JobHandle& self, std::uintptr_t indices, std::uintptr_t values) {
  require_done(self);
  nb::gil_scoped_release release;
  const auto rows = self.job().result_rows();
  const auto bytes = self.job().result_values();
  if (!rows.empty()) std::memcpy(reinterpret_cast<void*>(indices), rows.data(), rows.size_bytes());
  if (!bytes.empty()) std::memcpy(reinterpret_cast<void*>(values), bytes.data(), bytes.size());
}

// These calls are no schemes of a plan, but what went over the wire all the same.
void add_shard(const JobReport& report, nb::dict& result) {
  const bool scatters =
      report.call == JobCall::kScatterRows || report.call == JobCall::kScatterColumns;
  const bool rows = report.call == JobCall::kScatterRows || report.call == JobCall::kGatherRows;
  result["scheme"] = scatters ? "reduce_scatter" : "gather_rows";
  result["layout"] = rows ? "rows" : "columns";
  nb::list sent;
  for (const std::uint64_t units : report.shard.sent_units) sent.append(units);
  result["owner_units"] = sent;
  result["imbalance"] = report.shard.imbalance();
  result["largest_units"] = report.shard.largest_units;
}

}  // namespace

nb::dict to_dict(const JobReport& report) {
  nb::dict result;
  const std::string_view scheme = scheme_name(report.scheme);
  result["scheme"] = nb::str(scheme.data(), scheme.size());
  result["width"] = report.width;
  result["units"] = report.units;
  result["union_units"] = report.union_units;
  result["sent_bytes"] = report.sent_bytes;
  result["received_bytes"] = report.received_bytes;
  nb::list chunk_ends;
  for (const std::uint64_t end : report.chunk_ends) chunk_ends.append(end);
  result["chunk_ends"] = chunk_ends;
  result["seconds"] = report.seconds;
  if (report.call != JobCall::kAllReduce) add_shard(report, result);
  return result;
}

void bind_job(nb::module_& module) {
  nb::enum_<Outcome>(module, "Outcome", "How a job that did not fail has ended.")
      .value("DONE", Outcome::kDone)
      .value("USE_DENSE", Outcome::kUseDense);
  nb::class_<JobHandle>(module, "Job", "One synchronisation, under way or ended.")
      .def("wait", &wait, nb::arg("timeout_s"),
           "Waits for the end, at most `timeout_s` seconds; whether it has ended.")
      .def("done", [](const JobHandle& self) { return self.job().done(); })
      .def_prop_ro("error",
                   [](const JobHandle& self) {
                     require_done(self);
                     return to_object(self.job().status());
                   })
      .def_prop_ro("outcome",
                   [](const JobHandle& self) {
                     require_done(self);
                     return self.job().outcome();
                   })
      .def_prop_ro("report",
                   [](const JobHandle& self) {
                     require_done(self);
                     return to_dict(self.job().report());
                   })
      .def_prop_ro("result_entries",
                   [](const JobHandle& self) {
                     require_done(self);
                     return self.job().result_rows().size();
                   })
      .def("copy_result", &copy_result, nb::arg("indices"), nb::arg("values"));
}

}  // namespace zensync::python
