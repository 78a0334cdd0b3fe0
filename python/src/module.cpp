// The module `zensync._core`: what the core offers to Python. Place: python, level 6; one file per
// topic. Nothing here knows of torch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>

#include "engine.hpp"
#include "errors.hpp"
#include "job.hpp"
#include "link_driver.hpp"
#include "loopback.hpp"
#include "tensors.hpp"
#include "timing.hpp"
#include "torch_driver.hpp"
#include "zensync/base/env.hpp"
#include "zensync/kernels/kernels.hpp"

namespace nb = nanobind;

namespace zensync::python {
namespace {

// Drivers of this build, as their `name()` begins.
constexpr std::array<const char*, 4> kDrivers = {"native", "torch", "loopback", "counting"};

nb::str to_str(std::string_view text) { return nb::str(text.data(), text.size()); }

// version, kernels (usable, best first), kernels_active, simd (built in), drivers (built in).
nb::dict info() {
  nb::dict result;
  result["version"] = ZENSYNC_VERSION;
  nb::list usable;
  for (const kernels::Table* table : kernels::available()) usable.append(to_str(table->name));
  result["kernels"] = usable;
  const Result<const kernels::Table*> chosen = kernels::select(env().cpu_target);
  result["kernels_active"] = chosen.ok() ? nb::object(to_str(chosen.value()->name)) : nb::none();
  result["kernels_error"] = chosen.ok() ? nb::none() : nb::object(to_str(chosen.error().message));
  result["simd"] = ZENSYNC_SIMD_BUILT != 0;
  nb::list drivers;
  for (const char* name : kDrivers) drivers.append(name);
  result["drivers"] = drivers;
  return result;
}

// The settings from the environment that Python acts on.
nb::dict environment() {
  nb::dict result;
  result["disable"] = env().disable;
  result["transport"] = env().transport;
  result["interface_name"] = env().interface_name;
  return result;
}

}  // namespace
}  // namespace zensync::python

NB_MODULE(_core, module) {
  using namespace zensync::python;
  nb::set_leak_warnings(false);  // jobs may be alive at exit; they are closed by zensync.state
  module.doc() = "The core of zensync: engine, jobs, errors. Use the package `zensync` instead.";
  module.attr("__version__") = ZENSYNC_VERSION;  // not from info(), which reads the environment
  bind_errors(module);
  bind_tensors(module);
  bind_job(module);
  bind_engine(module);
  bind_loopback(module);
  bind_timing(module);
  bind_torch_driver(module);
  bind_link_driver(module);
  module.def("info", &info);
  module.def("environment", &environment);
}
