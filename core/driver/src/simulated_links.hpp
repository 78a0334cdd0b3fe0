// Times of messages in the simulated network: when one leaves, when it arrives, whether it does.
// Place: driver, level 4, private to the simulated driver; simulated.hpp has the model.
// Owner: it owns its options and a few numbers per rank and pair. Each number is changed for one
// rank only, in the order of that rank's own calls, so no result depends on threads.
// Threads: under the lock of the simulation. Nothing fails.
#pragma once

#include <vector>

#include "zensync/driver/simulated.hpp"

namespace zensync::driver {

struct Flight {
  VirtualTime left{0};   ///< the last byte has left the sender
  VirtualTime first{0};  ///< the first byte reaches the receiver's card
  VirtualTime last{0};   ///< the last one does
  bool arrives = true;
};

class SimulatedLinks {
 public:
  SimulatedLinks(int size, SimulatedOptions options);

  /// The next message from `from` to `to`, handed over at `now`.
  Flight send(Rank from, Rank to, std::uint64_t bytes, VirtualTime now);
  /// When a message of `bytes` has passed the card of `at`; calls in order of arrival.
  VirtualTime receive(Rank from, Rank at, std::uint64_t bytes, const Flight& flight);

  /// All messages of `rank` so far have left.
  VirtualTime all_left(Rank rank) const { return out_free_[index(rank)]; }
  /// When `rank` vanishes; VirtualTime::max() if it does not.
  VirtualTime death_of(Rank rank) const;
  VirtualTime latency() const { return options_.latency; }
  const Topology& topology() const { return options_.topology; }

 private:
  static std::size_t index(Rank rank) { return static_cast<std::size_t>(rank.value); }
  int host_of(Rank rank) const { return options_.topology.places[index(rank)].host; }
  VirtualTime on_card(Rank rank, std::uint64_t bytes) const;
  VirtualTime when_up(int from_host, int to_host, VirtualTime at) const;
  bool is_silent(int host, VirtualTime at) const;

  SimulatedOptions options_;
  std::vector<double> share_;           // bytes per second of each rank
  std::vector<VirtualTime> out_free_;   // per rank
  std::vector<VirtualTime> in_free_;    // per rank
  std::vector<VirtualTime> last_;       // per pair: arrival of its newest message
  std::vector<std::uint64_t> numbers_;  // per pair: messages so far
};

}  // namespace zensync::driver
