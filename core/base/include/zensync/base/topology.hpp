// Which ranks share a host, as plain data.
// Place: base, level 0. Drivers make it (the native mesh from what ranks publish about their hosts)
// and the context of every scheme carries it, though no scheme here uses it: two-level ones will.
// Values: they own their vector; no threads. Nothing can fail but for std::bad_alloc.
// Equal on all ranks of a mesh.
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
