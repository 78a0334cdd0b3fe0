// Ranks that are threads of one process, over a network that is only computed: production code runs
// as it is, time is virtual.
// Place: driver, level 4; for tests of faults and, later, the planner.
// Model: each rank has a clock, which moves when it waits for messages or for its cards, and by
// `spend`. A host has a card with `bytes_per_second` out and as many in; its ranks have equal
// shares of both, used or not (sharing by demand would make times depend on threads). A rank's
// messages leave one after another. One is on its way for `latency` and a seeded part of `jitter`,
// never overtakes an earlier one of its pair, and passes the receiver's share in order of arrival
// among the messages of one exchange. Within a host it takes `local_latency` and no card. No
// packets, no congestion inside the network, no cost of computing.
// Because each Recv names its peer, results and times are a function of inputs and seed, whatever
// threads do. Not determined: which of two ranks' aborts comes first, and when ranks see it.
// Deadlines: what is left until a deadline when a rank first calls with it is its virtual budget
// (whole ms, rounded up: so the moment of a deadline is not exact to the last ms). When every rank
// waits and nothing can come, the earliest deadline passes at once. Only while some rank's thread
// is outside its driver is real time waited for as well. Owner: the drivers and the network of one
// Simulation own it together. Threads: one per driver; `abort` and SimulatedNetwork from any. Fails
// as every driver (driver.hpp).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "zensync/driver/driver.hpp"

namespace zensync {

using VirtualTime = std::chrono::nanoseconds;  ///< since the start of the simulation

/// Messages to and from a host that would leave in [begin, end) leave at `end`.
struct LinkDown {
  int host = 0;
  VirtualTime begin{0};
  VirtualTime end{0};
};

/// The rank vanishes at `at`: what has not left by then never does.
struct VirtualDeath {
  Rank rank;
  VirtualTime at{0};
};

/// Messages to and from a host that would arrive after `at` never do, and nobody is told.
struct SilentHost {
  int host = 0;
  VirtualTime at{0};
};

struct SimulatedOptions {
  std::uint64_t seed = 1;
  VirtualTime latency{50'000};
  VirtualTime local_latency{5'000};
  VirtualTime jitter{0};             ///< at most so much is added to each message's latency
  double bytes_per_second = 1.25e9;  ///< of each card, in each direction; > 0
  Topology topology;                 ///< empty: every rank a host of its own
  std::vector<LinkDown> links_down;
  std::vector<VirtualDeath> deaths;
  std::vector<SilentHost> silent_hosts;
};

/// The clocks of all ranks.
class SimulatedNetwork {
 public:
  virtual ~SimulatedNetwork() = default;
  virtual VirtualTime now(Rank rank) const = 0;
  /// Lets `rank` compute for `time`; by its own thread, between its driver's calls.
  virtual void spend(Rank rank, VirtualTime time) = 0;
};

struct Simulation {
  std::vector<std::unique_ptr<Driver>> drivers;
  std::shared_ptr<SimulatedNetwork> network;
};

Simulation make_simulated(int size, SimulatedOptions options = {});

}  // namespace zensync
