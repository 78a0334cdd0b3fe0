// Bindings of the timing loops; see timing.hpp. Place: python, level 6. The GIL is released while
// they run.
#include "timing.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "errors.hpp"
#include "exchange_bench.hpp"
#include "kernel_timing.hpp"
#include "zensync/base/env.hpp"
#include "zensync/base/hash.hpp"
#include "zensync/driver/native_mesh.hpp"
#include "zensync/kernels/kernels.hpp"
#include "zensync/partition/partition.hpp"

namespace nb = nanobind;

namespace zensync::python {
namespace {

using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pairs = std::vector<std::pair<double, double>>;

Pairs to_pairs(const std::vector<TimedPair>& timed) {
  Pairs pairs;
  for (const TimedPair& pair : timed) pairs.emplace_back(pair.ours_s, pair.copy_s);
  return pairs;
}

std::span<float> span_of(const Floats& array) { return {array.data(), array.size()}; }

Pairs encode(const Floats& tensor, int ranks, int iterations) {
  nb::gil_scoped_release release;
  return to_pairs(time_encode(span_of(tensor), ranks, iterations));
}

Pairs write_back(const Floats& tensor, int ranks, int iterations) {
  nb::gil_scoped_release release;
  return to_pairs(time_write_back(span_of(tensor), ranks, iterations));
}

Pairs find_rows(const Floats& tensor, std::uint64_t row_elems, int iterations) {
  nb::gil_scoped_release release;
  return to_pairs(time_find_rows(span_of(tensor), row_elems, iterations));
}

double coalesce_once(const Indices& indices, const Floats& values) {
  const std::uint64_t row_elems = values.ndim() > 1 ? values.shape(1) : 1;
  nb::gil_scoped_release release;
  return time_coalesce({indices.data(), indices.size()}, values.data(), row_elems);
}

// Seconds of each exchange over a native mesh on loopback that meets in `folder`, or an Error.
nb::object exchange(const std::string& folder, int rank, int size, std::uint64_t message_bytes,
                    int iterations) {
  Result<std::vector<double>> seconds = std::vector<double>();
  {
    nb::gil_scoped_release release;
    auto rendezvous = make_file_rendezvous(folder);
    NativeMeshOptions options;
    options.rank = Rank{rank};
    options.size = size;
    options.name = "bench";
    auto mesh = open_native_mesh(options, *rendezvous);
    if (mesh.ok()) {
      ExchangeBenchOptions bench;
      bench.message_bytes = message_bytes;
      bench.iterations = iterations;
      seconds = bench_exchange(*mesh.value(), bench);
    } else {
      seconds = mesh.error();
    }
  }
  return seconds.ok() ? nb::cast(seconds.value()) : to_object(seconds.status());
}

// How many of `units` (of `all` units) each of `ranks` owners gets, by rotation or by equal ranges.
std::vector<std::uint64_t> owner_counts(const Indices& units, std::uint64_t all, int ranks,
                                        const std::string& name, bool rotation) {
  const Partition partition(rotation ? PartitionKind::kRotation : PartitionKind::kRange, all, ranks,
                            key_of(name));
  std::vector<std::uint64_t> counts(static_cast<std::size_t>(ranks));
  for (std::size_t i = 0; i < units.size(); ++i) {
    const Rank owner = partition.owner_of(static_cast<UnitId>(units.data()[i]));
    ++counts[static_cast<std::size_t>(owner.value)];
  }
  return counts;
}

}  // namespace

void bind_timing(nb::module_& module) {
  // None, or the Error of a ZENSYNC_CPU_TARGET that cannot run: asked before anything is timed.
  module.def("kernels_error", [] { return to_object(kernels::select(env().cpu_target).status()); });
  module.def("time_encode", &encode);
  module.def("time_write_back", &write_back);
  module.def("time_find_rows", &find_rows);
  module.def("time_coalesce", &coalesce_once);
  module.def("time_exchange", &exchange);
  module.def("owner_counts", &owner_counts);
}

}  // namespace zensync::python
