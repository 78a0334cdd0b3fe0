// An engine over the native mesh, as Python sees it. Place: python, level 6.
// Binds Engine, open_engine and address_towards; see engine.cpp for who owns what.
#pragma once

#include <nanobind/nanobind.h>

namespace zensync::python {

void bind_engine(nanobind::module_& module);

}  // namespace zensync::python
