// The Rendezvous of a process group: a Python object with set, get, wait, compare_set,
// check. Place:
// python, level 6. Takes the GIL for each call, so it must not be called after the interpreter's
// end (close the Engine first).
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <string>

#include "zensync/driver/rendezvous.hpp"

namespace zensync::python {

/// Adapts `object`: set(key: str, value: bytes), get(key) -> bytes, wait(key, timeout_s) -> bytes
/// or None when it never came, compare_set(key, expected: bytes, desired: bytes) -> bytes, check()
/// -> None. An exception of its becomes an error of kind kPeerLost: the store is out of reach. What
/// ends a wait is kept, because it may be meant for the caller of it all (an interrupt, a note).
class PyRendezvous final : public Rendezvous {
 public:
  explicit PyRendezvous(nanobind::object object) : object_(std::move(object)) {}
  PyRendezvous(const PyRendezvous&) = delete;
  PyRendezvous& operator=(const PyRendezvous&) = delete;
  ~PyRendezvous() override;

  Status set(const std::string& key, const std::string& value) override;
  Result<std::string> wait(const std::string& key, std::chrono::milliseconds timeout) override;
  Result<std::string> get(const std::string& key) override;
  Result<std::string> compare_set(const std::string& key, const std::string& expected,
                                  const std::string& desired) override;
  Status check() override;
  /// The first exception of `wait` or `check`, null if there was none; for the thread that waits.
  std::exception_ptr raised() const { return raised_; }

 private:
  nanobind::object object_;
  std::exception_ptr raised_;
};

}  // namespace zensync::python
