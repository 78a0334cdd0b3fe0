// Fault plans as text: what tests and drills hand to a process.
// Place: driver, level 4. Pure functions over strings; nothing is kept. A plan decides what a test
// shows, so nothing is guessed: a name that is unknown, given twice or foreign to its kind of fault
// is refused, and the error (kInvalid) quotes the fault it stands in.
#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <string_view>

#include "zensync/driver/faulty.hpp"

namespace zensync {
namespace {

constexpr const char* kNames[kFaultKinds] = {"delay",   "truncate", "corrupt", "duplicate",
                                             "reorder", "drop",     "die"};
constexpr std::uint64_t kMostMs = 24ULL * 3600 * 1000;
constexpr std::uint64_t kMostInt = std::numeric_limits<int>::max();

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kSpaces);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpaces) - begin + 1);
}

/// Cuts off what stands before `mark` (all, if it is not there).
std::string_view cut(std::string_view& rest, char mark) {
  const std::size_t end = rest.find(mark);
  const std::string_view head = rest.substr(0, end);
  rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
  return trimmed(head);
}

std::optional<std::uint64_t> number(std::string_view text, std::uint64_t most) {
  int base = 10;
  if (text.starts_with("0x")) {
    base = 16;
    text.remove_prefix(2);
  }
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value > most) {
    return {};
  }
  return value;
}

/// Fills one Fault from its text.
class FaultParser {
 public:
  FaultParser(std::string_view text, std::size_t place) : text_(text), place_(place) {}

  Result<Fault> parse() {
    std::string_view rest = text_;
    const std::string_view name = cut(rest, ':');
    const auto* found = std::find(std::begin(kNames), std::end(kNames), name);
    if (found == std::end(kNames)) return wrong("no kind of fault: '" + std::string(name) + "'");
    fault_.kind = static_cast<FaultKind>(found - std::begin(kNames));
    if (text_.find(':') != std::string_view::npos && trimmed(rest).empty()) {
      return wrong("nothing behind ':'");
    }
    while (!rest.empty()) {
      const bool more = rest.find(',') != std::string_view::npos;
      if (Status status = parse_pair(cut(rest, ',')); !status.ok()) return status.error();
      if (more && rest.empty()) return wrong("nothing behind the last ','");
    }
    if (fault_.kind == FaultKind::kDelay && !has("ms")) return wrong("a delay needs ms=…");
    return fault_;
  }

 private:
  Error wrong(const std::string& what) const {
    return make_error(ErrorKind::kInvalid, "fault " + std::to_string(place_ + 1) + " ('" +
                                               std::string(text_) + "'): " + what);
  }

  bool has(std::string_view name) const {
    return std::find(seen_.begin(), seen_.end(), name) != seen_.end();
  }

  Status parse_pair(std::string_view pair) {
    std::string_view value = pair;
    const std::string_view name = cut(value, '=');
    if (pair.find('=') == std::string_view::npos) {
      return wrong("NAME=VALUE expected in place of '" + std::string(pair) + "'");
    }
    if (has(name)) return wrong("'" + std::string(name) + "' stands there twice");
    seen_.push_back(name);
    value = trimmed(value);
    const std::optional<bool> good = set(name, value);
    if (!good) return wrong("'" + std::string(name) + "' means nothing to this kind of fault");
    if (!*good) return wrong("'" + std::string(name) + "' cannot be '" + std::string(value) + "'");
    return {};
  }

  /// Empty: no such name for this kind; false: not a value for it.
  std::optional<bool> set(std::string_view name, std::string_view value) {
    const FaultKind kind = fault_.kind;
    if (name == "exchange") {
      if (value != "every") return store(fault_.exchange, value, kMostInt);
      return true;
    }
    if (name == "peer" && kind != FaultKind::kDelay && kind != FaultKind::kDie) {
      if (value != "all") return store(fault_.peer.value, value, kMostInt);
      return true;
    }
    if (name == "ms" && kind == FaultKind::kDelay) {
      std::int64_t ms = 0;
      const bool good = store(ms, value, kMostMs);
      fault_.delay = std::chrono::milliseconds(ms);
      return good;
    }
    if (name == "bytes" && kind == FaultKind::kTruncate) {
      return store(fault_.bytes, value, ~0ULL) && fault_.bytes != 0;
    }
    if (name == "offset" && kind == FaultKind::kCorrupt) return store(fault_.offset, value, ~0ULL);
    if (name == "mask" && kind == FaultKind::kCorrupt) {
      return store(fault_.mask, value, 255) && fault_.mask != 0;
    }
    if (name == "after" && kind == FaultKind::kDie) return store(fault_.after, value, 1);
    if (name == "how" && kind == FaultKind::kDie) {
      fault_.signal = value == "signal";
      return fault_.signal || value == "vanish";
    }
    return {};
  }

  template <class T>
  static bool store(T& into, std::string_view value, std::uint64_t most) {
    const auto parsed = number(value, most);
    if (parsed) into = static_cast<T>(*parsed);
    return parsed.has_value();
  }

  const std::string_view text_;
  const std::size_t place_;
  Fault fault_;
  std::vector<std::string_view> seen_;
};

std::string fault_text(const Fault& fault) {
  std::string text;
  const auto add = [&text](const char* name, const std::string& value) {
    text += (text.empty() ? ":" : ",") + std::string(name) + "=" + value;
  };
  if (fault.exchange >= 0) add("exchange", std::to_string(fault.exchange));
  if (fault.peer.value >= 0) add("peer", std::to_string(fault.peer.value));
  if (fault.kind == FaultKind::kDelay) add("ms", std::to_string(fault.delay.count()));
  if (fault.kind == FaultKind::kTruncate) add("bytes", std::to_string(fault.bytes));
  if (fault.kind == FaultKind::kCorrupt) {
    add("offset", std::to_string(fault.offset));
    add("mask", std::to_string(fault.mask));
  }
  if (fault.kind == FaultKind::kDie) {
    add("after", fault.after ? "1" : "0");
    add("how", fault.signal ? "signal" : "vanish");
  }
  return fault_name(fault.kind) + text;
}

}  // namespace

const char* fault_name(FaultKind kind) { return kNames[static_cast<int>(kind)]; }

Result<FaultPlan> parse_faults(const std::string& text) {
  FaultPlan plan;
  std::string_view rest = text;
  while (!trimmed(rest).empty()) {
    const std::string_view one = cut(rest, ';');
    auto fault = FaultParser(one, plan.faults.size()).parse();
    if (!fault.ok()) return fault.error();
    plan.faults.push_back(fault.value());
  }
  return plan;
}

std::string faults_text(const std::vector<Fault>& faults) {
  std::string text;
  for (const Fault& fault : faults) {
    if (!text.empty()) text += ';';
    text += fault_text(fault);
  }
  return text;
}

}  // namespace zensync
