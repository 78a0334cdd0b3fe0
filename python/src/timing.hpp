// What `zensync bench` measures in the core: kernels, exchanges, balance of owners.
// Place: python, level 6. The timing itself is in bench/core and core/driver/bench.
#pragma once

#include <nanobind/nanobind.h>

namespace zensync::python {

void bind_timing(nanobind::module_& module);

}  // namespace zensync::python
