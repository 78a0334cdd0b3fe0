// Ranks that are threads of one process: one world of mailboxes, a queue per pair of ranks.
// Place: driver, level 4. The world is owned by all its drivers together; one mutex guards it, each
// rank waits on its own condition variable, and messages are copied outside the lock. Messages are
// copied when sent, so memory is free again at once; buffers are used again, so a warm exchange
// allocates nothing. Fails with kDeadline, kPeerLost (a driver was destroyed while a message from
// it is awaited), kCorruptMessage (longer than the Recv allows) and whatever a rank gave to
// `abort`.
#include "zensync/driver/loopback.hpp"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <optional>
#include <utility>

#include "common.hpp"

namespace zensync {
namespace {

using driver::deadline_error;
using driver::lost_error;

struct World {
  World(int ranks, Topology hosts)
      : size(ranks),
        topology(std::move(hosts)),
        arrived(static_cast<std::size_t>(ranks)),
        gone(static_cast<std::size_t>(ranks), false),
        mail(static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks)) {}

  std::deque<Buffer>& queue(int from, int to) {
    return mail[static_cast<std::size_t>(from) * static_cast<std::size_t>(size) +
                static_cast<std::size_t>(to)];
  }

  const int size;
  const Topology topology;
  std::mutex mutex;  // guards all that follows
  std::vector<std::condition_variable> arrived;
  std::vector<bool> gone;
  std::vector<std::deque<Buffer>> mail;
  std::vector<Buffer> spare;
  std::optional<Error> aborted;
};

class Loopback final : public Driver {
 public:
  Loopback(std::shared_ptr<World> world, int rank) : world_(std::move(world)), rank_{rank} {}
  ~Loopback() override {
    // A rank that failed and goes away without a word would leave the others guessing.
    if (dead_ && !vanished_ && !world_aborted()) abort(*dead_);
    const std::lock_guard lock(world_->mutex);
    leave();
  }

  Rank rank() const override { return rank_; }
  int size() const override { return world_->size; }
  const Topology& topology() const override { return world_->topology; }
  std::string name() const override { return "loopback"; }
  WireCount wire_count() const override { return count_; }

  Status exchange(const Exchange& exchange, Clock::time_point deadline) override {
    try {
      if (dead_) return *dead_;
      Status status = driver::check_exchange(exchange, rank_, size());
      if (status.ok()) status = post(exchange);
      if (status.ok()) status = receive(exchange, deadline);
      if (!status.ok()) dead_ = status.error();
      return status;
    } catch (const std::bad_alloc&) {
      dead_ = Error{ErrorKind::kCapacity, "no memory for a message", rank_, rank_, {}};
      return *dead_;
    }
  }

  Status flush(Clock::time_point) override {
    if (dead_) return *dead_;
    return {};
  }

  void abort(const Error& why) override {
    const std::lock_guard lock(world_->mutex);
    if (vanished_) return;
    if (!world_->aborted) world_->aborted = driver::reported_by(rank_, why);
    for (auto& one : world_->arrived) one.notify_all();
  }

  bool vanish() noexcept override {
    try {
      if (!dead_) dead_ = lost_error(rank_, rank_, "it vanished");
      const std::lock_guard lock(world_->mutex);
      vanished_ = true;
      leave();
      return true;
    } catch (...) {  // no memory for the text of the error
      return false;
    }
  }

 private:
  struct Arrival {
    std::size_t recv;
    Buffer message;
  };

  /// The world's lock is held.
  void leave() {
    world_->gone[index(rank_)] = true;
    for (auto& one : world_->arrived) one.notify_all();
  }

  static std::size_t index(Rank rank) { return static_cast<std::size_t>(rank.value); }

  bool world_aborted() {
    const std::lock_guard lock(world_->mutex);
    return world_->aborted.has_value();
  }

  Buffer spare_buffer() {
    const std::lock_guard lock(world_->mutex);
    if (world_->spare.empty()) return {};
    Buffer buffer = std::move(world_->spare.back());
    world_->spare.pop_back();
    return buffer;
  }

  Status post(const Exchange& exchange) {
    for (const Send& send : exchange.sends) {
      Buffer copy = spare_buffer();
      copy.clear();
      copy.append(send.message.data(), send.message.size());
      const std::lock_guard lock(world_->mutex);
      if (world_->aborted) return *world_->aborted;
      if (world_->gone[index(send.to)]) return lost_error(rank_, send.to, "its driver is closed");
      world_->queue(rank_.value, send.to.value).push_back(std::move(copy));
      world_->arrived[index(send.to)].notify_one();
      ++count_.sent_messages;
      count_.sent_bytes += kFramePrefixBytes + send.message.size();
    }
    return {};
  }

  Status receive(const Exchange& exchange, Clock::time_point deadline) {
    open_.clear();
    for (std::size_t i = 0; i < exchange.recvs.size(); ++i) open_.push_back(i);
    do {
      if (Status status = wait_for_some(exchange, deadline); !status.ok()) return status;
      for (Arrival& arrival : arrivals_) {
        if (Status status = store(exchange.recvs[arrival.recv], arrival.message); !status.ok()) {
          return status;
        }
      }
      const std::lock_guard lock(world_->mutex);
      for (Arrival& arrival : arrivals_) world_->spare.push_back(std::move(arrival.message));
      arrivals_.clear();
    } while (!open_.empty());
    return {};
  }

  /// Moves what has come for the open Recvs into `arrivals_`; waits while that is nothing.
  Status wait_for_some(const Exchange& exchange, Clock::time_point deadline) {
    std::unique_lock lock(world_->mutex);
    arrivals_.clear();
    for (;;) {
      if (world_->aborted) return *world_->aborted;
      take(exchange);
      if (!arrivals_.empty() || open_.empty()) return {};
      for (const std::size_t recv : open_) {
        const Rank from = exchange.recvs[recv].from;
        if (world_->gone[index(from)]) return lost_error(rank_, from, "its driver is closed");
      }
      if (Clock::now() >= deadline) return late(exchange);
      world_->arrived[index(rank_)].wait_until(lock, deadline);
    }
  }

  void take(const Exchange& exchange) {
    // In the order of the Recvs: the oldest one from a peer gets the oldest message.
    std::size_t kept = 0;
    for (const std::size_t recv : open_) {
      auto& queue = world_->queue(exchange.recvs[recv].from.value, rank_.value);
      if (queue.empty()) {
        open_[kept++] = recv;
        continue;
      }
      arrivals_.push_back({recv, std::move(queue.front())});
      queue.pop_front();
    }
    open_.resize(kept);
  }

  Error late(const Exchange& exchange) const {
    std::vector<int> missing;
    for (const std::size_t recv : open_) missing.push_back(exchange.recvs[recv].from.value);
    return deadline_error(rank_, missing, {});
  }

  Status store(const Recv& recv, const Buffer& message) {
    if (message.size() > recv.capacity_bytes) {
      return driver::too_long_error(rank_, recv.from, message.size(), recv.capacity_bytes);
    }
    recv.into->resize_discard(message.size());
    if (message.size() != 0) std::memcpy(recv.into->data(), message.data(), message.size());
    ++count_.received_messages;
    count_.received_bytes += kFramePrefixBytes + message.size();
    return {};
  }

  std::shared_ptr<World> world_;
  const Rank rank_;
  WireCount count_;
  std::optional<Error> dead_;
  bool vanished_ = false;          // guarded by the world's mutex: `abort` may come from any thread
  std::vector<std::size_t> open_;  // indices of Recvs that still wait
  std::vector<Arrival> arrivals_;
};

}  // namespace

std::vector<std::unique_ptr<Driver>> make_loopback(int size, Topology topology) {
  auto world = std::make_shared<World>(size, std::move(topology));
  std::vector<std::unique_ptr<Driver>> drivers;
  for (int rank = 0; rank < size; ++rank) {
    drivers.push_back(std::make_unique<Loopback>(world, rank));
  }
  return drivers;
}

}  // namespace zensync
