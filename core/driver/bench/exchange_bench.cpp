// Times exchanges on any driver; see exchange_bench.hpp.
// Place: beside driver, level 4. Two sets of messages alternate, since those of one exchange must
// stay as they are until the next has ended. Peers are taken in shifted order (rank + 1, rank + 2,
// and so on), as schemes do, so that not all ranks write to one first. No thread of its own; errors
// are the driver's.
#include "exchange_bench.hpp"

#include <cstring>
#include <new>

namespace zensync {
namespace {

struct Messages {
  std::vector<Buffer> out;
  std::vector<Buffer> in;
  Exchange exchange;
};

Messages make_messages(const Driver& driver, std::uint64_t message_bytes) {
  Messages messages;
  const int size = driver.size();
  messages.out.resize(static_cast<std::size_t>(size));
  messages.in.resize(static_cast<std::size_t>(size));
  for (int shift = 1; shift < size; ++shift) {
    const int to = (driver.rank().value + shift) % size;
    const int from = (driver.rank().value + size - shift) % size;
    Buffer& out = messages.out[static_cast<std::size_t>(to)];
    Buffer& in = messages.in[static_cast<std::size_t>(from)];
    out.resize_discard(static_cast<std::size_t>(message_bytes));
    if (message_bytes != 0) std::memset(out.data(), to, out.size());
    messages.exchange.sends.push_back({Rank{to}, out.bytes()});
    messages.exchange.recvs.push_back({Rank{from}, message_bytes, &in});
  }
  return messages;
}

Result<std::vector<double>> run(Driver& driver, const ExchangeBenchOptions& options) {
  Messages barrier = make_messages(driver, 0);
  Messages messages[2] = {make_messages(driver, options.message_bytes),
                          make_messages(driver, options.message_bytes)};
  std::vector<double> seconds;
  seconds.reserve(static_cast<std::size_t>(options.iterations));
  Status status = driver.exchange(barrier.exchange, Clock::now() + options.timeout);
  for (int i = -options.warm_up; i < options.iterations && status.ok(); ++i) {
    const auto start = Clock::now();
    status = driver.exchange(messages[i & 1].exchange, start + options.timeout);
    if (i < 0) continue;
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  if (status.ok()) status = driver.flush(Clock::now() + options.timeout);
  if (!status.ok()) return status.error();
  return seconds;
}

}  // namespace

Result<std::vector<double>> bench_exchange(Driver& driver, const ExchangeBenchOptions& options) {
  try {
    return run(driver, options);
  } catch (const std::bad_alloc&) {
    return Error{ErrorKind::kCapacity,
                 "no memory for the messages of the benchmark",
                 driver.rank(),
                 driver.rank(),
                 {}};
  }
}

}  // namespace zensync
