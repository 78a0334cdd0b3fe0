// Times exchanges on any driver: every rank sends to and receives from every peer, again and again.
// Place: beside driver, level 4; for `zensync bench --exchange` and the program exchange_main.
// A collective call: all ranks of the driver make it with equal options, each on its driver's
// thread. Owns its messages while it runs. Fails with the driver's errors.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "zensync/driver/driver.hpp"

namespace zensync {

struct ExchangeBenchOptions {
  std::uint64_t message_bytes = 20000;  ///< to each peer
  int iterations = 1000;
  int warm_up = 20;                          ///< exchanges before the clock counts
  std::chrono::milliseconds timeout{60000};  ///< of one exchange
};

/// Seconds of each iteration, as this rank saw them.
Result<std::vector<double>> bench_exchange(Driver& driver, const ExchangeBenchOptions& options);

}  // namespace zensync
