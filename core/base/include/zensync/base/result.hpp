// Results and errors: the core returns values.
// Place: base, level 0. Every error says what happened, on which rank and tensor; Python maps each
// kind to one exception class.
// No module prints, exits, or throws across its edge, with one exception: std::bad_alloc passes
// through all of them, and the engine makes kCapacity of it.
// Values: they own their texts; no threads. Ask `ok()` first: `error()` of a good Status has no
// meaning, `value()` of a failed Result throws std::bad_variant_access.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "zensync/base/types.hpp"

namespace zensync {

enum class ErrorKind {
  kMismatch,        ///< ranks disagree (order, shape, dtype, layout, settings)
  kPeerLost,        ///< a rank went away
  kDeadline,        ///< not finished in time
  kCorruptMessage,  ///< bytes from a peer fail a check
  kUnsupported,     ///< what was asked for cannot be done
  kCapacity,        ///< a stated bound on memory or size does not suffice
  kInvalid,         ///< the caller's arguments do not fit together
  kInternal,        ///< a defect of zensync
};

struct Error {
  ErrorKind kind = ErrorKind::kInternal;
  std::string message;  ///< what happened and what to do
  Rank rank{};          ///< the rank that saw it (−1: not known yet)
  Rank culprit{};       ///< the rank that caused it (−1: not known)
  std::string tensor;   ///< name of the tensor, empty if none
};

/// Success or an Error.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::move(error)) {}  // NOLINT(google-explicit-constructor)
  bool ok() const { return !error_.has_value(); }
  const Error& error() const { return *error_; }
  Error& error() { return *error_; }

 private:
  std::optional<Error> error_;
};

/// A value or an Error.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}      // NOLINT(google-explicit-constructor)
  Result(Error error) : state_(std::move(error)) {}  // NOLINT(google-explicit-constructor)
  bool ok() const { return state_.index() == 0; }
  T& value() { return std::get<0>(state_); }
  const T& value() const { return std::get<0>(state_); }
  const Error& error() const { return std::get<1>(state_); }
  Status status() const { return ok() ? Status() : Status(error()); }

 private:
  std::variant<T, Error> state_;
};

inline Error make_error(ErrorKind kind, std::string message, Rank culprit = {}) {
  return Error{kind, std::move(message), Rank{}, culprit, {}};
}

}  // namespace zensync
