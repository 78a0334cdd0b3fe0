// The torch driver: exchanges of the core on torch.distributed, through a Python object (the link).
// Place: python, level 6; its Python half is zensync/_torch_driver.py.
// Owner: the driver owns a reference to the link. Threads: those of driver.hpp; the GIL is taken
// once per exchange, and torch lets it go while it waits. Must be destroyed before the interpreter
// ends (close the Engine first).
// `abort` drops the connections, which is all that peers see of it here: the reason reaches them
// over the control connections.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "zensync/driver/driver.hpp"

namespace zensync::python {

/// `link` has exchange(sends, recvs, timeout_s) and flush(timeout_s), which return None or an
/// ErrorInfo, and abort() and close(), which drop the connections and are bounded in time.
/// sends: (peer, memoryview) each, which stay readable until the next exchange or a flush has
/// ended well; recvs: RecvSlot, dead when the call has returned. Needs the GIL.
std::unique_ptr<Driver> make_torch_driver(Rank rank, int size, Topology topology,
                                          nanobind::object link);

/// RecvSlot, and the wording of errors.
void bind_torch_driver(nanobind::module_& module);

}  // namespace zensync::python
