// A trace as JSON, in the format that chrome://tracing and Perfetto read.
// Place: driver, level 4. Pure functions from events to text; memory only. Times are microseconds
// with three digits behind the point, written from integers, so no nanosecond is rounded away.
// Texts of errors may come from a peer and hold any bytes: what is not UTF-8 is replaced, else the
// whole file would be unreadable.
#include <string_view>

#include "zensync/driver/tracing.hpp"

namespace zensync {
namespace {

constexpr char kHex[] = "0123456789abcdef";

/// Bytes of the UTF-8 character at the start of `text`; 0 if there is none.
std::size_t character_bytes(std::string_view text) {
  const auto at = [text](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = at(0);
  if (first < 0x80) return 1;
  const std::size_t bytes = first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  if (bytes == 0 || first > 0xF4 || text.size() < bytes) return 0;
  for (std::size_t i = 1; i < bytes; ++i) {
    if (at(i) >> 6 != 2) return 0;
  }
  const bool too_long = (first == 0xE0 && at(1) < 0xA0) || (first == 0xF0 && at(1) < 0x90);
  const bool surrogate = first == 0xED && at(1) >= 0xA0;
  const bool too_large = first == 0xF4 && at(1) >= 0x90;
  return too_long || surrogate || too_large ? 0 : bytes;
}

void put_string(std::string& json, std::string_view text) {
  json += '"';
  while (!text.empty()) {
    const std::size_t bytes = character_bytes(text);
    const auto first = static_cast<unsigned char>(text[0]);
    if (bytes == 0) {
      json += "\\ufffd";
    } else if (first == '"' || first == '\\') {
      json += '\\';
      json += text[0];
    } else if (first < 0x20 || first == 0x7F) {
      json += "\\u00";
      json += kHex[first >> 4];
      json += kHex[first & 15];
    } else {
      json += text.substr(0, bytes);
    }
    text.remove_prefix(bytes == 0 ? 1 : bytes);
  }
  json += '"';
}

void put_us(std::string& json, std::int64_t ns) {
  const std::string digits = std::to_string(ns % 1000);
  json += std::to_string(ns / 1000) + '.' + std::string(3 - digits.size(), '0') + digits;
}

void put_ranks(std::string& json, std::string_view name, const std::vector<int>& ranks) {
  if (ranks.empty()) return;
  json += ",\"" + std::string(name) + "\":[";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i != 0) json += ',';
    json += std::to_string(ranks[i]);
  }
  json += ']';
}

void put_event(std::string& json, const TraceEvent& event) {
  std::string name = trace_name(event.kind);
  if (!event.phase.empty()) name += ' ' + event.phase;
  json += "{\"name\":";
  put_string(json, name);
  json += R"(,"cat":"driver","ph":"X","pid":)" + std::to_string(event.rank.value);
  json += ",\"tid\":0,\"ts\":";
  put_us(json, event.start_ns);
  json += ",\"dur\":";
  put_us(json, event.end_ns - event.start_ns);
  json += ",\"args\":{\"sent_bytes\":" + std::to_string(event.sent_bytes) +
          ",\"received_bytes\":" + std::to_string(event.received_bytes);
  put_ranks(json, "sent_to", event.sent_to);
  put_ranks(json, "awaited_from", event.awaited_from);
  if (!event.status.ok()) {
    json += ",\"error\":";
    put_string(json, event.status.error().message);
    json += ",\"culprit\":" + std::to_string(event.status.error().culprit.value);
  }
  json += "}}";
}

}  // namespace

std::string Trace::chrome_json() const {
  const std::vector<TraceEvent> all = events();
  std::string json = "{\"displayTimeUnit\":\"ns\",\"otherData\":{\"events_left_out\":\"" +
                     std::to_string(left_out()) + "\"},\"traceEvents\":[";
  std::vector<bool> named;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i != 0) json += ",\n";
    const auto rank = static_cast<std::size_t>(all[i].rank.value);
    if (rank >= named.size()) named.resize(rank + 1);
    if (!named[rank]) {
      json += R"({"name":"process_name","ph":"M","pid":)" + std::to_string(rank) +
              R"(,"args":{"name":"rank )" + std::to_string(rank) + "\"}},\n";
      named[rank] = true;
    }
    put_event(json, all[i]);
  }
  return json + "]}\n";
}

}  // namespace zensync
