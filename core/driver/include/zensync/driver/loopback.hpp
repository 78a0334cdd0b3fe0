// Ranks that are threads of one process, over mailboxes in memory.
// Place: driver, level 4; for tests, `zensync bench --bytes`, examples.
// Owner: the drivers of one world own it together; it lives as long as any of them. Messages are
// copied when sent, so that senders never wait and their memory is free at once.
// Threads: one per driver; `abort` from any.
// Fails as every driver (driver.hpp): kDeadline, kPeerLost when a driver was destroyed while a
// message from it is awaited, kCorruptMessage when a message is too long, a peer's own error.
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
