// How ranks find each other before they have connections: a small store of keys and values.
// Place: driver, level 4. Python adapts the process group's Store to it; C++ programs use the
// file-based one.
// Owner: the caller. A mesh uses it until it is open; control connections as long as they live, to
// agree on a fault.
// Whoever waits for something else than a key meanwhile asks `check` a few times a second.
// Threads: one at a time while a mesh is opened, and then whichever has a fault to tell. Calls may
// block, `wait` for as long as it is told.
// Fails with kDeadline (`wait`) and whatever the store behind it reports (files: kUnsupported).
#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

#include "zensync/base/result.hpp"

namespace zensync {

class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  virtual Status set(const std::string& key, const std::string& value) = 0;
  /// The value of `key`, after waiting for it at most `timeout`; kDeadline if it never came.
  virtual Result<std::string> wait(const std::string& key, std::chrono::milliseconds timeout) = 0;
  /// The value of `key` at once; an empty string if there is none.
  virtual Result<std::string> get(const std::string& key) = 0;
  /// Sets `key` to `desired` if its value is `expected` (empty: no value yet); returns the value
  /// that holds afterwards.
  virtual Result<std::string> compare_set(const std::string& key, const std::string& expected,
                                          const std::string& desired) = 0;
  /// Why what is being opened can be given up: another rank has failed, the caller was
  /// interrupted. ok while nothing is known. `wait` ends for the same reasons.
  virtual Status check() { return {}; }
};

/// One file per key in `folder` (made if missing), which all ranks can reach. Atomic by rename and
/// link.
std::unique_ptr<Rendezvous> make_file_rendezvous(const std::filesystem::path& folder);

}  // namespace zensync
