// Sums of NumPy arrays over ranks that are threads: for tests and `zensync bench`. Place: python,
// level 6.
#pragma once

#include <nanobind/nanobind.h>

namespace zensync::python {

void bind_loopback(nanobind::module_& module);

}  // namespace zensync::python
