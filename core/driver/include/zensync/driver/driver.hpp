// The contract of every driver: it performs exchanges, with a deadline, and can be aborted.
// Place: driver, level 4; the engine is its caller, scheme/exchange.hpp has the rules of exchanges.
// Owner: it owns sockets or mailboxes, never the messages; those stay the caller's and must not
// change until the next exchange has ended, or a flush.
// Threads: a driver belongs to one thread (the engine's). `abort` may come from any thread: it may
// wait for the exchange under way to stop, and then for peers' systems to take the reason (the
// native mesh: about 200 ms at most).
// Every call ends, at its deadline if not before. Every error names the peer that caused it, where
// one did; after an error the driver is dead.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "zensync/base/result.hpp"
#include "zensync/base/topology.hpp"
#include "zensync/scheme/exchange.hpp"

namespace zensync {

/// Messages and bytes that one rank sent and received, prefixes included, self excluded.
struct WireCount {
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
  std::uint64_t sent_messages = 0;
  std::uint64_t received_messages = 0;
};

using Clock = std::chrono::steady_clock;

class Driver {
 public:
  virtual ~Driver() = default;
  virtual Rank rank() const = 0;
  virtual int size() const = 0;
  virtual const Topology& topology() const = 0;
  /// "loopback", "native", …: what `zensync info` and logs call it.
  virtual std::string name() const = 0;

  /// Posts the sends and waits for the recvs (exchange.hpp has the rules). Peers are never this
  /// rank. kDeadline at `deadline`; kPeerLost when a peer is gone; the peer's own error when it
  /// aborted. After an error the driver is dead: every later call returns the same error.
  virtual Status exchange(const Exchange& exchange, Clock::time_point deadline) = 0;

  /// Waits until every byte handed over has left (the sends' memory is free again).
  virtual Status flush(Clock::time_point deadline) = 0;

  /// Tells all peers why this rank gives up (they get `why` as the error of their next or current
  /// exchange) and drops all connections; bounded in time. Idempotent; the first reason counts.
  /// Sends of an exchange that succeeded and was not flushed are still read; those of one that
  /// failed are not.
  virtual void abort(const Error& why) = 0;

  /// Goes away as a killed process would: connections end, and nobody is told why. For fault
  /// injection, on the driver's own thread; every later call fails with kPeerLost. False where a
  /// driver cannot do that; nothing has changed then.
  virtual bool vanish() noexcept { return false; }

  virtual WireCount wire_count() const = 0;

  /// In a forked child only: lets go of the parent's connections, so that its end shows. Nothing
  /// else may be called afterwards.
  virtual void close_handles_in_child() noexcept {}
};

}  // namespace zensync
