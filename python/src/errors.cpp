// Errors on their way to Python; see errors.hpp. Place: python, level 6.
// Kinds travel as text, in the order of ErrorKind.
#include "errors.hpp"

#include <nanobind/stl/string.h>

#include <array>
#include <string_view>

namespace nb = nanobind;

namespace zensync::python {
namespace {

// In the order of ErrorKind.
constexpr std::array<std::string_view, 8> kKinds = {"mismatch",        "peer_lost",   "deadline",
                                                    "corrupt_message", "unsupported", "capacity",
                                                    "invalid",         "internal"};

}  // namespace

ErrorInfo to_info(const Error& error) {
  const auto index = static_cast<std::size_t>(error.kind);
  const std::string_view kind = index < kKinds.size() ? kKinds[index] : kKinds.back();
  return {std::string(kind), error.message, error.rank.value, error.culprit.value, error.tensor};
}

Error from_info(const ErrorInfo& info) {
  Error error;
  for (std::size_t i = 0; i < kKinds.size(); ++i) {
    if (kKinds[i] == info.kind) error.kind = static_cast<ErrorKind>(i);
  }
  error.message = info.message;
  error.rank = Rank{info.rank};
  error.culprit = Rank{info.culprit};
  error.tensor = info.tensor;
  return error;
}

nb::object to_object(const Status& status) {
  if (status.ok()) return nb::none();
  return nb::cast(to_info(status.error()));
}

void bind_errors(nb::module_& module) {
  nb::class_<ErrorInfo>(module, "ErrorInfo", "What went wrong, and who saw and caused it.")
      .def(
          "__init__",
          [](ErrorInfo* self, std::string kind, std::string message, std::string tensor) {
            new (self) ErrorInfo{std::move(kind), std::move(message), -1, -1, std::move(tensor)};
          },
          nb::arg("kind"), nb::arg("message"), nb::arg("tensor") = "")
      .def_rw("kind", &ErrorInfo::kind)
      .def_rw("message", &ErrorInfo::message)
      .def_rw("rank", &ErrorInfo::rank)
      .def_rw("culprit", &ErrorInfo::culprit)
      .def_rw("tensor", &ErrorInfo::tensor)
      .def("__repr__", [](const ErrorInfo& self) {
        return "ErrorInfo(" + self.kind + ": " + self.message + ")";
      });
}

}  // namespace zensync::python
