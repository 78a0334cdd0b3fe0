// Options of an Engine, from a Python dict. Place: python, level 6. Unknown keys and wrong values
// are errors.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "zensync/driver/faulty.hpp"
#include "zensync/driver/native_mesh.hpp"
#include "zensync/engine/engine.hpp"

namespace zensync::python {

struct OpenOptions {
  EngineOptions engine;
  std::string name;  ///< prefix of the mesh's rendezvous keys
  std::string address = "127.0.0.1";
  std::string host_id;                       ///< equal on ranks that share a host; empty: found out
  std::chrono::milliseconds timeout{60000};  ///< to open the mesh
  std::chrono::milliseconds connect_timeout{60000};
  std::chrono::milliseconds beat{1000};
  std::chrono::milliseconds warn_after{10000};
  std::chrono::milliseconds silent_after{60000};
  std::string caller_settings;  ///< settings of the caller's own that every rank must share
  bool control = true;          ///< whether there are control connections
  std::vector<Fault> faults;    ///< what this rank is to do wrong, for tests
  nanobind::object open_link;   ///< gives the torch driver's link; none: the native mesh
  /// Settings that every rank must share, as text.
  std::string settings() const;
};

/// `options` may have: name, address, scheme, max_bytes, deadline_s, silent_after_s, verify, hosts,
/// timeout_s, connect_timeout_s, control, open_link, caller_settings and, for tests and
/// comparisons, beat_s, warn_after_s, faults, codec, partition and parts (of a row); None means
/// "not given". ZENSYNC_VERIFY overrides `verify`. Errors: kInvalid, kUnsupported. Needs the GIL.
Result<OpenOptions> parse_options(const nanobind::dict& options);

/// Seconds as milliseconds, at least 1.
std::chrono::milliseconds to_milliseconds(double seconds);

}  // namespace zensync::python
