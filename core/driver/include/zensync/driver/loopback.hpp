// Ranks that are threads of one process. Place: driver, level 4. For tests, `zensync bench
// --bytes`, examples.
#pragma once

#include <memory>
#include <vector>

#include "zensync/driver/driver.hpp"

namespace zensync {

/// n drivers that reach each other; each is used by one thread. They share one world, which lives
/// as long as any of them. Messages are copied at send, so senders never wait.
std::vector<std::unique_ptr<Driver>> make_loopback(int size, Topology topology);
inline std::vector<std::unique_ptr<Driver>> make_loopback(int size) {
  return make_loopback(size, flat_topology(size));
}

}  // namespace zensync
