// The Rendezvous of a process group; see rendezvous.hpp. Place: python, level 6.
// Exceptions of the Python object end here, as errors.
#include "rendezvous.hpp"

#include <nanobind/stl/string.h>

#include <exception>

namespace nb = nanobind;

namespace zensync::python {
namespace {

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

std::string to_text(const nb::object& value) {
  const auto bytes = nb::cast<nb::bytes>(value);
  return {bytes.c_str(), bytes.size()};
}

Error store_error(const char* what, const std::string& key, const std::exception& why) {
  const std::string call = std::string(what) + " \"" + key + "\"";
  return make_error(ErrorKind::kPeerLost,
                    "the process group's store failed to " + call + ": " + why.what());
}

}  // namespace

PyRendezvous::~PyRendezvous() {
  if (!Py_IsInitialized()) {
    static_cast<void>(object_.release());  // the interpreter is gone, and the object with it
    return;
  }
  nb::gil_scoped_acquire gil;
  object_.reset();
}

Status PyRendezvous::set(const std::string& key, const std::string& value) {
  nb::gil_scoped_acquire gil;
  try {
    object_.attr("set")(key, to_bytes(value));
    return {};
  } catch (const std::exception& why) {
    return store_error("set", key, why);
  }
}

Result<std::string> PyRendezvous::wait(const std::string& key, std::chrono::milliseconds timeout) {
  nb::gil_scoped_acquire gil;
  try {
    const double timeout_s = static_cast<double>(timeout.count()) / 1000.0;
    const nb::object value = object_.attr("wait")(key, timeout_s);
    if (value.is_none()) {
      return make_error(ErrorKind::kDeadline,
                        "\"" + key + "\" did not appear in the process group's store");
    }
    return to_text(value);
  } catch (const std::exception& why) {
    if (!raised_) raised_ = std::current_exception();
    return store_error("wait for", key, why);
  }
}

Result<std::string> PyRendezvous::get(const std::string& key) {
  nb::gil_scoped_acquire gil;
  try {
    return to_text(object_.attr("get")(key));
  } catch (const std::exception& why) {
    return store_error("get", key, why);
  }
}

Result<std::string> PyRendezvous::compare_set(const std::string& key, const std::string& expected,
                                              const std::string& desired) {
  nb::gil_scoped_acquire gil;
  try {
    return to_text(object_.attr("compare_set")(key, to_bytes(expected), to_bytes(desired)));
  } catch (const std::exception& why) {
    return store_error("compare and set", key, why);
  }
}

Status PyRendezvous::check() {
  nb::gil_scoped_acquire gil;
  try {
    object_.attr("check")();
    return {};
  } catch (const std::exception& why) {
    if (!raised_) raised_ = std::current_exception();
    return make_error(ErrorKind::kPeerLost, std::string("given up: ") + why.what());
  }
}

}  // namespace zensync::python
