// A decorator that notes what a driver did and when: one event per exchange, flush and abort.
// Place: driver, level 4; for `zensync report`, examples and tests.
// Owner: `Trace` owns the events and may serve several drivers; each decorator shares it and owns
// its inner driver. A Trace keeps at most as many events as it was told and counts the others.
// Threads: a Trace may be used by any; a decorator as its inner driver.
// Fails as the inner driver does, unchanged; std::bad_alloc when there is no memory for an event.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "zensync/driver/driver.hpp"

namespace zensync {

enum class TraceKind { kExchange, kFlush, kAbort };

struct TraceEvent {
  TraceKind kind = TraceKind::kExchange;
  Rank rank;
  std::string phase;          ///< of the Exchange; empty for flush and abort
  std::int64_t start_ns = 0;  ///< steady clock
  std::int64_t end_ns = 0;
  std::uint64_t sent_bytes = 0;      ///< handed over, prefixes included
  std::uint64_t received_bytes = 0;  ///< 0 if the exchange failed
  std::vector<int> sent_to;          ///< ascending, without duplicates
  std::vector<int> awaited_from;
  Status status;  ///< of the call; of an abort: its reason
};

class Trace {
 public:
  explicit Trace(std::size_t most_events = 1 << 20) : most_events_(most_events) {}
  void add(TraceEvent event) noexcept;
  /// In the order in which they ended.
  std::vector<TraceEvent> events() const;
  /// Events that found no room.
  std::uint64_t left_out() const;
  /// All events in the format of chrome://tracing and Perfetto: a process per rank, times in µs.
  std::string chrome_json() const;

 private:
  const std::size_t most_events_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<TraceEvent> events_;
  std::uint64_t left_out_ = 0;
};

using TraceSink = std::shared_ptr<Trace>;

std::unique_ptr<Driver> make_tracing(std::unique_ptr<Driver> inner, TraceSink sink);

/// "exchange", "flush", "abort".
const char* trace_name(TraceKind kind);

}  // namespace zensync
