// Every setting that the core takes from the environment, in one place.
// Place: base, level 0; `src/env.cpp` is the only reader of the environment in the core.
// Read once, at the first call, and kept as long as the process lives: what changes later has no
// effect. Owned by this module; callers get a reference that is never invalid.
// Threads: any (the first call is guarded); set variables before threads start.
// Nothing here fails: a wrong value is kept as text and refused by whoever uses it.
#pragma once

#include <string>

namespace zensync {

struct Env {
  /// ZENSYNC_CPU_TARGET: name of the kernel set to use ("ref", "avx2", …); empty: the best one.
  std::string cpu_target;
  /// ZENSYNC_VERIFY: "0" or "1", digests off or on for every State; empty: as the State says.
  std::string verify;
  /// ZENSYNC_DISABLE=1: plain all-reduce behind the same calls (read by Python).
  bool disable = false;
  /// ZENSYNC_TRANSPORT: "native" (also when empty) or "torch" (a later driver).
  std::string transport;
  /// GLOO_SOCKET_IFNAME: the interface that the mesh binds to; empty: the one that reaches the
  /// store.
  std::string interface_name;
};

/// The environment as it was at the first call.
const Env& env();

}  // namespace zensync
