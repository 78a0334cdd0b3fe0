// Options of an Engine, from a Python dict; see options.hpp. Place: python, level 6.
// The environment comes last, so that it overrides what a program says.
#include "options.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "zensync/base/env.hpp"
#include "zensync/kernels/kernels.hpp"

namespace nb = nanobind;

namespace zensync::python {
namespace {

constexpr double kLongestSeconds = 1e9;

Error bad_option(const std::string& key, const std::string& why) {
  return make_error(ErrorKind::kInvalid, "option \"" + key + "\" " + why);
}

// In the order of IndexCodec.
constexpr std::array<std::string_view, 6> kCodecs = {"none",   "raw32",  "raw64",
                                                     "blocks", "bitmap", "elias_fano"};

Status set_codec(WireOptions& wire, const std::string& name) {
  for (std::size_t i = 1; i < kCodecs.size(); ++i) {
    if (kCodecs[i] != name) continue;
    wire.codec = static_cast<IndexCodec>(i);
    return {};
  }
  return bad_option("codec", "must be raw32, raw64, blocks, bitmap or elias_fano");
}

std::chrono::milliseconds* time_option(OpenOptions& parsed, const std::string& key) {
  if (key == "deadline_s") return &parsed.engine.deadline;
  if (key == "timeout_s") return &parsed.timeout;
  if (key == "connect_timeout_s") return &parsed.connect_timeout;
  if (key == "beat_s") return &parsed.beat;
  if (key == "warn_after_s") return &parsed.warn_after;
  if (key == "silent_after_s") return &parsed.silent_after;
  return nullptr;
}

// Sets one option; ok, or why not.
Status set_option(OpenOptions& parsed, const std::string& key, nb::handle value) {
  if (key == "scheme") {
    Result<SchemeId> scheme = scheme_from_name(nb::cast<std::string>(value));
    if (!scheme.ok()) return scheme.error();
    parsed.engine.scheme = scheme.value();
  } else if (key == "max_bytes") {
    parsed.engine.max_bytes = nb::cast<std::uint64_t>(value);
  } else if (key == "parts") {
    parsed.engine.parts = nb::cast<std::uint64_t>(value);
  } else if (std::chrono::milliseconds* time = time_option(parsed, key)) {
    const double seconds = nb::cast<double>(value);
    if (!(seconds > 0)) return bad_option(key, "must be above 0");
    *time = to_milliseconds(seconds);
  } else if (key == "verify") {
    parsed.engine.wire.verify = nb::cast<bool>(value);
  } else if (key == "name") {
    parsed.name = nb::cast<std::string>(value);
  } else if (key == "address") {
    parsed.address = nb::cast<std::string>(value);
  } else if (key == "hosts") {
    parsed.host_id = nb::cast<std::string>(value);
  } else if (key == "caller_settings") {
    parsed.caller_settings = nb::cast<std::string>(value);
  } else if (key == "control") {
    parsed.control = nb::cast<bool>(value);
  } else if (key == "faults") {
    Result<FaultPlan> plan = parse_faults(nb::cast<std::string>(value));
    if (!plan.ok()) return plan.error();
    parsed.faults = std::move(plan.value().faults);
  } else if (key == "open_link") {
    parsed.open_link = nb::borrow(value);
    parsed.engine.overlap = false;  // an exchange costs milliseconds there
  } else if (key == "codec") {
    return set_codec(parsed.engine.wire, nb::cast<std::string>(value));
  } else if (key == "partition") {
    const auto partition = nb::cast<std::string>(value);
    if (partition != "rotation" && partition != "range") {
      return bad_option(key, "must be rotation or range");
    }
    parsed.engine.wire.partition =
        partition == "range" ? PartitionKind::kRange : PartitionKind::kRotation;
  } else {
    return bad_option(key, "is not known");
  }
  return {};
}

// What the environment says, after the caller.
Status apply_environment(OpenOptions& parsed) {
  const std::string& verify = env().verify;
  if (!verify.empty() && verify != "0" && verify != "1") {
    return make_error(ErrorKind::kInvalid,
                      "ZENSYNC_VERIFY is \"" + verify + "\"; it must be 0 or 1");
  }
  if (!verify.empty()) parsed.engine.wire.verify = verify == "1";
  return kernels::select(env().cpu_target).status();
}

}  // namespace

std::chrono::milliseconds to_milliseconds(double seconds) {
  const double bounded = std::clamp(seconds, 0.001, kLongestSeconds);
  return std::chrono::milliseconds(std::llround(bounded * 1000.0));
}

std::string OpenOptions::settings() const {
  return "scheme=" + std::string(scheme_name(engine.scheme)) +
         " max_bytes=" + std::to_string(engine.max_bytes) +
         " parts=" + std::to_string(engine.parts) +
         " codec=" + std::string(kCodecs[static_cast<std::size_t>(engine.wire.codec)]) +
         " partition=" + (engine.wire.partition == PartitionKind::kRange ? "range" : "rotation") +
         " transport=" + (open_link.is_valid() ? "torch" : "native") +
         " verify=" + (engine.wire.verify ? "1" : "0") +
         (caller_settings.empty() ? "" : " " + caller_settings);
}

Result<OpenOptions> parse_options(const nb::dict& options) {
  OpenOptions parsed;
  for (auto [key, value] : options) {
    const auto name = nb::cast<std::string>(key);
    if (value.is_none()) continue;
    try {
      if (Status status = set_option(parsed, name, value); !status.ok()) return status.error();
    } catch (const nb::cast_error&) {
      return bad_option(name, "has a value of the wrong type");
    }
  }
  if (Status status = apply_environment(parsed); !status.ok()) return status.error();
  return parsed;
}

}  // namespace zensync::python
