// Which ranks share a host, as plain data. Schemes get it from the first day, though only two-level
// ones use it. Place: base, level 0.
#pragma once

#include <vector>

#include "zensync/base/types.hpp"

namespace zensync {

/// Place of one rank: `host` 0 ≤ host < hosts, `local_rank` counts the ranks of that host in order.
struct Place {
  int host = 0;
  int local_rank = 0;
};

struct Topology {
  std::vector<Place> places;  ///< one per rank
  int size() const { return static_cast<int>(places.size()); }
};

/// Every rank a host of its own.
inline Topology flat_topology(int size) {
  Topology topology;
  for (int rank = 0; rank < size; ++rank) topology.places.push_back({rank, 0});
  return topology;
}

}  // namespace zensync
