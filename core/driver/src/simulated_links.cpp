// Times of messages in the simulated network. Place: driver, level 4, private.
// Cut-through: the receiver's card is taken from the first byte on, so two equal cards cost the
// time of one. All arithmetic is in whole nanoseconds but for the division by the rate, which is
// rounded up, so times are equal on every machine with IEEE doubles. Nothing fails.
#include "simulated_links.hpp"

#include <algorithm>
#include <cmath>

#include "zensync/base/hash.hpp"

namespace zensync::driver {

SimulatedLinks::SimulatedLinks(int size, SimulatedOptions options) : options_(std::move(options)) {
  if (options_.topology.places.empty()) options_.topology = flat_topology(size);
  const auto ranks = static_cast<std::size_t>(size);
  out_free_.resize(ranks);
  in_free_.resize(ranks);
  last_.resize(ranks * ranks);
  numbers_.resize(ranks * ranks);
  for (int rank = 0; rank < size; ++rank) {
    const auto& places = options_.topology.places;
    const auto sharing = std::count_if(places.begin(), places.end(), [&](const Place& place) {
      return place.host == host_of(Rank{rank});
    });
    share_.push_back(options_.bytes_per_second / static_cast<double>(sharing));
  }
}

VirtualTime SimulatedLinks::on_card(Rank rank, std::uint64_t bytes) const {
  const double ns = std::ceil(static_cast<double>(bytes) * 1e9 / share_[index(rank)]);
  return VirtualTime(static_cast<VirtualTime::rep>(ns));
}

VirtualTime SimulatedLinks::when_up(int from_host, int to_host, VirtualTime at) const {
  for (bool moved = true; moved;) {
    moved = false;
    for (const LinkDown& down : options_.links_down) {
      if (down.host != from_host && down.host != to_host) continue;
      if (at < down.begin || at >= down.end) continue;
      at = down.end;
      moved = true;
    }
  }
  return at;
}

bool SimulatedLinks::is_silent(int host, VirtualTime at) const {
  return std::any_of(
      options_.silent_hosts.begin(), options_.silent_hosts.end(),
      [&](const SilentHost& silent) { return silent.host == host && at > silent.at; });
}

Flight SimulatedLinks::send(Rank from, Rank to, std::uint64_t bytes, VirtualTime now) {
  const std::size_t pair = index(from) * out_free_.size() + index(to);
  const std::uint64_t number = numbers_[pair]++;
  const int from_host = host_of(from);
  const int to_host = host_of(to);
  Flight flight;
  VirtualTime on_its_way = options_.local_latency;
  VirtualTime begin = now;
  VirtualTime on_out_card{0};
  if (from_host != to_host) {
    begin = when_up(from_host, to_host, std::max(now, out_free_[index(from)]));
    on_out_card = on_card(from, bytes);
    out_free_[index(from)] = begin + on_out_card;
    const std::uint64_t hash = mix64(mix64(mix64(options_.seed) ^ pair) ^ number);
    const auto most = static_cast<std::uint64_t>(options_.jitter.count()) + 1;
    on_its_way = options_.latency + VirtualTime(static_cast<VirtualTime::rep>(hash % most));
  }
  flight.left = begin + on_out_card;
  flight.first = begin + on_its_way;
  flight.last = std::max(flight.left + on_its_way, last_[pair]);
  last_[pair] = flight.last;
  flight.arrives = flight.left <= death_of(from) && !is_silent(from_host, flight.last) &&
                   !is_silent(to_host, flight.last);
  return flight;
}

VirtualTime SimulatedLinks::receive(Rank from, Rank at, std::uint64_t bytes, const Flight& flight) {
  if (host_of(from) == host_of(at)) return flight.last;
  const VirtualTime begin = std::max(flight.first, in_free_[index(at)]);
  in_free_[index(at)] = begin + on_card(at, bytes);
  return std::max(in_free_[index(at)], flight.last);
}

VirtualTime SimulatedLinks::death_of(Rank rank) const {
  VirtualTime earliest = VirtualTime::max();
  for (const VirtualDeath& death : options_.deaths) {
    if (death.rank == rank) earliest = std::min(earliest, death.at);
  }
  return earliest;
}

}  // namespace zensync::driver
