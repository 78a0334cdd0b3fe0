// The control connections of a State: heartbeats, and why a rank gives up.
// Place: driver, level 4. A second full mesh of TCP connections, whatever driver carries the data,
// with one thread per rank that neither Python nor a busy engine can stall. It tells dead, silent
// and slow ranks apart, and makes all ranks name the same fault: the first rank that sees one
// tells all peers and writes it through the Rendezvous; every rank reads it there before its job
// ends (docs/failure_model.md).
// Owner: it owns its sockets, its thread and the Rendezvous. Every call may come from any thread.
// Errors are told through `Faults`; it never prints, and never ends a process.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zensync/base/result.hpp"
#include "zensync/base/topology.hpp"
#include "zensync/driver/native_mesh.hpp"
#include "zensync/driver/rendezvous.hpp"

namespace zensync {

struct ControlOptions {
  /// As for a native mesh, with a name of its own.
  NativeMeshOptions mesh;
  std::chrono::milliseconds beat{1000};
  /// A wait that takes so long is worth a notice; then after twice as long, and so on.
  std::chrono::milliseconds warn_after{10000};
  /// A rank whose heartbeat stopped for so long is given up by those who wait.
  std::chrono::milliseconds silent_after{60000};
  /// False where ranks cannot connect to each other: settings are compared and the Rendezvous says
  /// what the fault is, but nobody is told of it, and silence ends at the deadline of a job.
  bool has_connections = true;
};

/// For whoever fails beside control connections: how long a lost peer waits for what they say (they
/// know within a tenth of it, and the network's delay), and an error for what all ranks call it.
inline constexpr std::chrono::milliseconds kAskLimit{1000};
inline constexpr std::chrono::milliseconds kSettleLimit{2000};

class Control {
 public:
  /// Called on the control's thread. final: no rank will name another fault from now on.
  using Faults = std::function<void(const Error& why, bool final)>;

  virtual ~Control() = default;
  virtual const Topology& topology() const = 0;
  /// From now on faults that peers report or cause are told, also what is known already. At most
  /// once; heartbeats go before, from when the connections stand.
  virtual void start(Faults faults) = 0;
  /// The fault as it is known here, also before `start`. ok if there is none.
  virtual Status fault() const = 0;
  /// As `fault`, but waits for one at most `limit`; not without connections, which alone can tell.
  /// For whoever has lost a peer: that one may have left because of another.
  virtual Status await_fault(std::chrono::milliseconds limit) = 0;

  // What this rank does, for its peers and for notices; cheap.
  virtual void begin_job(const std::string& tensor) = 0;
  virtual void begin_exchange(const char* phase) = 0;  ///< waits from here on, until `end_job`
  virtual void end_job() = 0;
  /// The caller waits in a dense all-reduce of its own.
  virtual void begin_dense(const std::string& tensor) = 0;
  virtual void end_dense() = 0;

  /// Tells all peers why this rank gives up. Never waits; the first fault counts.
  virtual void report(const Error& why) = 0;
  /// The fault that all ranks name, once it is known; the first one known here, where that takes
  /// longer than `limit` from when it was known (so only the first call waits). ok if there was
  /// none.
  virtual Status settle(std::chrono::milliseconds limit) = 0;
  /// The rank that holds up this one, from heartbeats; −1 where nobody is behind.
  virtual Rank behind() const = 0;
  /// Lines for people, since the last call: who is waited for, and for how long.
  virtual std::vector<std::string> take_notices() = 0;
  /// In a forked child only: lets go of the parent's connections, so that its end shows.
  virtual void close_handles_in_child() noexcept = 0;
};

/// Opens the connections; a collective call, errors as of `open_native_mesh`.
Result<std::unique_ptr<Control>> open_control(const ControlOptions& options,
                                              std::shared_ptr<Rendezvous> rendezvous);

/// `inner`, over which nobody waits any longer once `control` knows a fault: `wait` and `check`
/// return it. For what is opened after the control connections. Both must outlive it.
std::unique_ptr<Rendezvous> make_watched_rendezvous(Rendezvous& inner, const Control& control);

}  // namespace zensync
