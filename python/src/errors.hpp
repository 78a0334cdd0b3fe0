// Errors on their way to Python: as values. Place: python, level 6. `zensync.errors.raise_error`
// turns one into the exception class of its kind; nothing here throws for what went wrong while
// synchronising.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "zensync/base/result.hpp"

namespace zensync::python {

/// What Python sees of an Error. Ranks are −1 where they are not known.
struct ErrorInfo {
  std::string kind;  ///< "mismatch", "peer_lost", "deadline", "corrupt_message", …
  std::string message;
  int rank = -1;
  int culprit = -1;
  std::string tensor;
};

ErrorInfo to_info(const Error& error);
/// The reverse, for errors that are found in Python; an unknown kind is kInternal.
Error from_info(const ErrorInfo& info);
/// None while `status` is ok, else an ErrorInfo. Needs the GIL.
nanobind::object to_object(const Status& status);

void bind_errors(nanobind::module_& module);

}  // namespace zensync::python
