// Ranks that are threads, over a network that is only computed: drivers, clocks, and the moment at
// which nothing can happen any more.
// Place: driver, level 4; times of messages are computed in simulated_links.hpp. The world is owned
// by all drivers and the network together; one mutex guards it, each rank waits on its own
// condition variable. Messages are copied when sent. A rank takes its messages only when all that
// an exchange awaits are there, so that the order in which threads run has no say. Fails as the
// loopback does; deadlines are virtual (simulated.hpp).
#include "zensync/driver/simulated.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <optional>
#include <utility>

#include "common.hpp"
#include "simulated_links.hpp"

namespace zensync {
namespace {

using driver::Flight;
using driver::lost_error;

std::size_t index(Rank rank) { return static_cast<std::size_t>(rank.value); }

struct Message {
  Flight flight;
  std::vector<std::byte> bytes;
};

enum class Where {
  kOutside,  ///< of its driver: may do anything
  kWaiting,
  kGone,
};

struct RankState {
  Where where = Where::kOutside;
  VirtualTime now{0};
  VirtualTime until{0};              ///< waiting: its virtual deadline
  std::vector<std::size_t> awaited;  ///< waiting: messages, per peer
  bool gave_up = false;              ///< waiting: nothing can come, and its moment was the earliest
  std::condition_variable changed;
};

class World final : public SimulatedNetwork {
 public:
  World(int size, SimulatedOptions options)
      : links(size, std::move(options)),
        ranks(static_cast<std::size_t>(size)),
        mail(ranks.size() * ranks.size()) {
    for (RankState& rank : ranks) rank.awaited.resize(ranks.size());
  }

  VirtualTime now(Rank rank) const override {
    const std::lock_guard lock(mutex);
    return ranks[index(rank)].now;
  }

  void spend(Rank rank, VirtualTime time) override {
    const std::lock_guard lock(mutex);
    ranks[index(rank)].now += time;
  }

  // What follows is called with the lock held.

  std::deque<Message>& queue(Rank from, Rank to) {
    return mail[index(from) * ranks.size() + index(to)];
  }

  /// The peers that `rank` waits for in vain so far.
  std::vector<int> missing(Rank rank) {
    std::vector<int> peers;
    for (int peer = 0; peer < static_cast<int>(ranks.size()); ++peer) {
      const std::size_t awaited = ranks[index(rank)].awaited[static_cast<std::size_t>(peer)];
      if (queue(Rank{peer}, rank).size() < awaited) peers.push_back(peer);
    }
    return peers;
  }

  bool is_stuck(Rank rank) {
    if (aborted || ranks[index(rank)].gave_up) return false;
    const std::vector<int> peers = missing(rank);
    return !peers.empty() && std::none_of(peers.begin(), peers.end(), [this](int peer) {
      return ranks[static_cast<std::size_t>(peer)].where == Where::kGone;
    });
  }

  VirtualTime moment_of(Rank rank) const {
    return std::min(ranks[index(rank)].until, links.death_of(rank));
  }

  /// If every rank waits and nothing can come, the earliest moment passes.
  void pass_time_if_stuck() {
    std::optional<Rank> earliest;
    for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
      const Rank rank{i};
      if (ranks[index(rank)].where == Where::kGone) continue;
      if (ranks[index(rank)].where == Where::kOutside || !is_stuck(rank)) return;
      if (!earliest || moment_of(rank) < moment_of(*earliest)) earliest = rank;
    }
    if (!earliest) return;
    ranks[index(*earliest)].gave_up = true;
    ranks[index(*earliest)].changed.notify_all();
  }

  void wake_all() {
    for (RankState& rank : ranks) rank.changed.notify_all();
  }

  mutable std::mutex mutex;  // guards all that follows
  driver::SimulatedLinks links;
  std::vector<RankState> ranks;
  std::vector<std::deque<Message>> mail;
  std::optional<Error> aborted;
  VirtualTime aborted_at{0};
};

class Simulated final : public Driver {
 public:
  Simulated(std::shared_ptr<World> world, Rank rank) : world_(std::move(world)), rank_(rank) {}
  ~Simulated() override {
    const std::lock_guard lock(world_->mutex);
    if (dead_ && own().where != Where::kGone) pass_on(*dead_);
    leave();
  }

  Rank rank() const override { return rank_; }
  int size() const override { return static_cast<int>(world_->ranks.size()); }
  const Topology& topology() const override { return world_->links.topology(); }
  std::string name() const override { return "simulated"; }
  WireCount wire_count() const override { return count_; }

  Status exchange(const Exchange& exchange, Clock::time_point deadline) override {
    return guarded([&] {
      Status status = driver::check_exchange(exchange, rank_, size());
      if (!status.ok()) return status;
      std::unique_lock lock(world_->mutex);
      own().until = until(deadline);
      const VirtualTime old_left = world_->links.all_left(rank_);
      status = post(exchange);
      if (status.ok()) status = await(exchange, lock, deadline);
      if (!status.ok()) return status;
      return take(exchange, old_left);
    });
  }

  Status flush(Clock::time_point deadline) override {
    return guarded([&] {
      const std::lock_guard lock(world_->mutex);
      own().until = until(deadline);
      return advance(world_->links.all_left(rank_));
    });
  }

  void abort(const Error& why) override {
    const std::lock_guard lock(world_->mutex);
    if (own().where != Where::kGone) pass_on(why);
  }

  bool vanish() noexcept override {
    try {
      const std::lock_guard lock(world_->mutex);
      if (!dead_) dead_ = lost_error(rank_, rank_, "it vanished");
      leave();
      return true;
    } catch (...) {  // no memory for the text of the error
      return false;
    }
  }

 private:
  RankState& own() { return world_->ranks[index(rank_)]; }

  template <class Work>
  Status guarded(Work work) {
    if (dead_) return *dead_;
    Status status;
    try {
      status = work();
    } catch (const std::bad_alloc&) {
      status = Error{ErrorKind::kCapacity, "no memory for a message", rank_, rank_, {}};
    }
    if (!status.ok()) dead_ = status.error();
    return status;
  }

  void pass_on(const Error& why) {
    if (!world_->aborted) {
      world_->aborted = driver::reported_by(rank_, why);
      world_->aborted_at = own().now;
    }
    world_->wake_all();
  }

  void leave() {
    own().where = Where::kGone;
    world_->wake_all();
  }

  /// The virtual deadline; one deadline stays the same moment in all calls.
  VirtualTime until(Clock::time_point deadline) {
    if (deadline_ && *deadline_ == deadline) return until_;
    constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 3650);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    deadline_ = deadline;
    until_ = own().now + std::clamp(left, std::chrono::milliseconds(0), kLongest);
    return until_;
  }

  Status died() {
    own().now = world_->links.death_of(rank_);
    leave();
    return lost_error(rank_, rank_, "its simulated death");
  }

  /// Whether `peer`'s end is known here by now.
  bool is_known_gone(Rank peer) {
    const RankState& state = world_->ranks[index(peer)];
    VirtualTime gone = world_->links.death_of(peer);
    if (state.where == Where::kGone) gone = std::min(gone, state.now);
    return gone != VirtualTime::max() && own().now >= gone + world_->links.latency();
  }

  Status post(const Exchange& exchange) {
    if (own().now >= world_->links.death_of(rank_)) return died();
    if (world_->aborted) return aborted();
    for (const Send& send : exchange.sends) {
      if (is_known_gone(send.to)) return lost_error(rank_, send.to, "its driver is closed");
      const std::uint64_t bytes = kFramePrefixBytes + send.message.size();
      Message message{world_->links.send(rank_, send.to, bytes, own().now),
                      {send.message.begin(), send.message.end()}};
      if (message.flight.arrives) {
        world_->queue(rank_, send.to).push_back(std::move(message));
        world_->ranks[index(send.to)].changed.notify_all();
      }
      ++count_.sent_messages;
      count_.sent_bytes += bytes;
    }
    return {};
  }

  /// Waits until all messages of the exchange are there.
  Status await(const Exchange& exchange, std::unique_lock<std::mutex>& lock,
               Clock::time_point deadline) {
    RankState& state = own();
    std::fill(state.awaited.begin(), state.awaited.end(), 0);
    for (const Recv& recv : exchange.recvs) ++state.awaited[index(recv.from)];
    for (;;) {
      if (world_->aborted) return aborted();
      const std::vector<int> missing = world_->missing(rank_);
      if (missing.empty()) return {};
      for (const int peer : missing) {
        if (world_->ranks[static_cast<std::size_t>(peer)].where == Where::kGone) {
          return gone(Rank{peer});
        }
      }
      if (state.gave_up || Clock::now() >= deadline) return late(missing);
      state.where = Where::kWaiting;
      world_->pass_time_if_stuck();
      if (!state.gave_up) state.changed.wait_until(lock, deadline);
      state.where = Where::kOutside;
    }
  }

  Status aborted() {
    const VirtualTime seen = std::min(world_->aborted_at + world_->links.latency(), own().until);
    if (world_->links.death_of(rank_) <= seen) return died();  // it did not live to see it
    own().now = std::max(own().now, seen);
    return *world_->aborted;
  }

  Status gone(Rank peer) {
    const VirtualTime seen = world_->ranks[index(peer)].now + world_->links.latency();
    if (seen > std::max(own().now, own().until)) return late({peer.value});
    if (Status status = advance(seen); !status.ok()) return status;
    return lost_error(rank_, peer, "its driver is closed");
  }

  /// Moves the clock on to `to`, if this rank lives as long and its deadline is not before.
  Status advance(VirtualTime to) {
    if (to <= own().now) return {};
    if (to > own().until) {
      if (Status status = late({}); status.error().kind != ErrorKind::kDeadline) return status;
      return Error{
          ErrorKind::kDeadline, "deadline passed: messages have not left yet", rank_, {}, {}};
    }
    if (world_->links.death_of(rank_) <= to) return died();
    own().now = to;
    return {};
  }

  /// The deadline passes before what `peers` send is there.
  Status late(const std::vector<int>& peers) {
    const VirtualTime end = std::max(own().now, own().until);
    if (world_->links.death_of(rank_) <= end) return died();
    own().now = end;
    return driver::deadline_error(rank_, peers, {});
  }

  /// All messages are there: moves the clock to where the last one has come in, and stores them.
  Status take(const Exchange& exchange, VirtualTime old_left) {
    std::vector<Message> messages;
    for (const Recv& recv : exchange.recvs) {
      auto& queue = world_->queue(recv.from, rank_);
      messages.push_back(std::move(queue.front()));
      queue.pop_front();
    }
    if (Status status = pass_card(exchange, messages, old_left); !status.ok()) return status;
    for (std::size_t i = 0; i < messages.size(); ++i) {
      const Recv& recv = exchange.recvs[i];
      const std::vector<std::byte>& bytes = messages[i].bytes;
      if (bytes.size() > recv.capacity_bytes) {
        return driver::too_long_error(rank_, recv.from, bytes.size(), recv.capacity_bytes);
      }
      recv.into->resize_discard(bytes.size());
      if (!bytes.empty()) std::memcpy(recv.into->data(), bytes.data(), bytes.size());
      ++count_.received_messages;
      count_.received_bytes += kFramePrefixBytes + bytes.size();
    }
    return {};
  }

  Status pass_card(const Exchange& exchange, const std::vector<Message>& messages,
                   VirtualTime old_left) {
    std::vector<std::size_t> order(messages.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      const auto key = [&](std::size_t i) {
        return std::pair(messages[i].flight.first, std::pair(exchange.recvs[i].from, i));
      };
      return key(a) < key(b);
    });
    VirtualTime end = old_left;
    std::vector<int> missed;
    for (const std::size_t i : order) {
      const std::uint64_t bytes = kFramePrefixBytes + messages[i].bytes.size();
      const Rank from = exchange.recvs[i].from;
      const VirtualTime here = world_->links.receive(from, rank_, bytes, messages[i].flight);
      if (here > std::max(own().now, own().until)) missed.push_back(from.value);
      end = std::max(end, here);
    }
    return missed.empty() ? advance(end) : late(missed);
  }

  std::shared_ptr<World> world_;
  const Rank rank_;
  WireCount count_;
  std::optional<Error> dead_;
  std::optional<Clock::time_point> deadline_;
  VirtualTime until_{0};
};

}  // namespace

Simulation make_simulated(int size, SimulatedOptions options) {
  auto world = std::make_shared<World>(size, std::move(options));
  Simulation simulation;
  for (int rank = 0; rank < size; ++rank) {
    simulation.drivers.push_back(std::make_unique<Simulated>(world, Rank{rank}));
  }
  simulation.network = std::move(world);
  return simulation;
}

}  // namespace zensync
