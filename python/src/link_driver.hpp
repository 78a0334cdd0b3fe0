// A torch driver without an engine, as Python sees it: for tests of the driver's contract.
// Place: python, level 6. Binds LinkDriver; see link_driver.cpp for who owns what.
#pragma once

#include <nanobind/nanobind.h>

namespace zensync::python {

void bind_link_driver(nanobind::module_& module);

}  // namespace zensync::python
