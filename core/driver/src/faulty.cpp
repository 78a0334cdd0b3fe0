// A decorator that does wrong what its plan says, to what this rank sends.
// Place: driver, level 4. Owns the inner driver and copies of changed messages: those of one
// exchange are kept until the exchange after the next begins, as scheme/exchange.hpp asks; a
// message that waits for the next exchange is kept apart. An exchange without faults passes through
// as it is. One thread, but for `abort`, which says nothing once the rank is dead. Fails as the
// inner driver does, with kPeerLost after `die`, with kCapacity when there is no memory for copies.
#include "zensync/driver/faulty.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "common.hpp"

namespace zensync {
namespace {

using Bytes = std::vector<std::byte>;

class Faulty final : public Driver {
 public:
  Faulty(std::unique_ptr<Driver> inner, FaultPlan plan)
      : plan_(std::move(plan)), inner_(std::move(inner)) {}

  Rank rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const Topology& topology() const override { return inner_->topology(); }
  std::string name() const override { return "faulty(" + inner_->name() + ")"; }
  WireCount wire_count() const override { return inner_->wire_count(); }

  Status exchange(const Exchange& exchange, Clock::time_point deadline) override {
    if (failed_) return *failed_;
    try {
      return exchange_or_die(exchange, deadline);
    } catch (const std::bad_alloc&) {
      return fail(Error{ErrorKind::kCapacity, "no memory for a message", rank(), rank(), {}});
    }
  }

  Status flush(Clock::time_point deadline) override {
    if (failed_) return *failed_;
    if (!held_.empty()) {
      begin(Exchange());
      for (Held& held : held_) sends().push_back({held.to, keep(std::move(held.message))});
      held_.clear();
      if (Status status = inner_->exchange(own_, deadline); !status.ok()) return status;
    }
    return inner_->flush(deadline);
  }

  void abort(const Error& why) override {
    if (!is_dead_) inner_->abort(why);
  }

  void close_handles_in_child() noexcept override { inner_->close_handles_in_child(); }

  bool vanish() noexcept override {
    if (!inner_->vanish()) return false;
    is_dead_ = true;
    return true;
  }

 private:
  /// A message that goes behind the next one to its peer.
  struct Held {
    Rank to;
    Bytes message;
  };

  Status exchange_or_die(const Exchange& exchange, Clock::time_point deadline) {
    const int number = exchanges_++;
    const Fault* death = nullptr;
    bool as_it_is = held_.empty();
    for (const Fault& fault : plan_.faults) {
      if (fault.exchange >= 0 && fault.exchange != number) continue;
      if (fault.kind == FaultKind::kDelay) {
        note(fault);
        std::this_thread::sleep_until(std::min(Clock::now() + fault.delay, deadline));
      } else if (fault.kind == FaultKind::kDie) {
        if (death == nullptr) death = &fault;
      } else {
        as_it_is = false;
      }
    }
    if (death != nullptr && !death->after) return die(*death);
    if (as_it_is && death == nullptr) return inner_->exchange(exchange, deadline);
    begin(exchange);
    for (const Send& send : exchange.sends) add(send, number);
    const std::vector<Rank> released = release();
    reorder(number, released);
    if (death == nullptr) return inner_->exchange(own_, deadline);
    own_.recvs.clear();
    // What comes of the sends does not matter any more: an error cannot stop a death.
    if (inner_->exchange(own_, deadline).ok()) (void)inner_->flush(deadline);
    return die(*death);
  }

  std::vector<Send>& sends() { return own_.sends; }

  /// An exchange of our own, with the other's Recvs; copies of the one before the last are free.
  void begin(const Exchange& exchange) {
    old_copies_.swap(copies_);
    copies_.clear();
    own_ = exchange;
    own_.sends.clear();
  }

  std::span<const std::byte> keep(Bytes message) {
    copies_.push_back(std::move(message));
    return copies_.back();
  }

  void note(const Fault& fault) const {
    if (plan_.acted) plan_.acted(fault);
  }

  /// The message as it leaves: changed, twice, or not at all.
  void add(Send send, int number) {
    int times = 1;
    for (const Fault& fault : plan_.faults) {
      if (fault.exchange >= 0 && fault.exchange != number) continue;
      if (fault.peer.value >= 0 && fault.peer != send.to) continue;
      switch (fault.kind) {
        case FaultKind::kTruncate: {
          const std::uint64_t missing = std::min<std::uint64_t>(fault.bytes, send.message.size());
          send.message = send.message.first(send.message.size() - missing);
          break;
        }
        case FaultKind::kCorrupt: {
          if (send.message.empty()) continue;
          Bytes copy(send.message.begin(), send.message.end());
          copy[std::min<std::uint64_t>(fault.offset, copy.size() - 1)] ^= std::byte{fault.mask};
          send.message = keep(std::move(copy));
          break;
        }
        case FaultKind::kDuplicate:
          ++times;
          break;
        case FaultKind::kDrop:
          times = 0;
          break;
        default:
          continue;
      }
      note(fault);
    }
    for (; times > 0; --times) sends().push_back(send);
  }

  /// Puts messages that were held back behind the first one to their peer; the peers it did so for.
  std::vector<Rank> release() {
    std::vector<Rank> peers;
    for (Held& held : held_) {
      const auto first = std::find_if(sends().begin(), sends().end(),
                                      [&](const Send& send) { return send.to == held.to; });
      if (first == sends().end()) continue;
      peers.push_back(held.to);
      sends().insert(first + 1, {held.to, keep(std::move(held.message))});
    }
    std::erase_if(held_, [&](const Held& held) {
      return std::find(peers.begin(), peers.end(), held.to) != peers.end();
    });
    return peers;
  }

  void reorder(int number, const std::vector<Rank>& released) {
    for (const Fault& fault : plan_.faults) {
      if (fault.kind != FaultKind::kReorder) continue;
      if (fault.exchange >= 0 && fault.exchange != number) continue;
      for (int peer = 0; peer < size(); ++peer) {
        if (fault.peer.value >= 0 && fault.peer.value != peer) continue;
        if (std::find(released.begin(), released.end(), Rank{peer}) != released.end()) continue;
        if (swap_two(Rank{peer})) note(fault);
      }
    }
  }

  bool swap_two(Rank peer) {
    const auto to_peer = [peer](const Send& send) { return send.to == peer; };
    const auto first = std::find_if(sends().begin(), sends().end(), to_peer);
    if (first == sends().end()) return false;
    const auto second = std::find_if(first + 1, sends().end(), to_peer);
    if (second != sends().end()) {
      std::swap(*first, *second);
      return true;
    }
    const bool has_one = std::any_of(held_.begin(), held_.end(),
                                     [peer](const Held& held) { return held.to == peer; });
    if (has_one) return false;
    held_.push_back({peer, Bytes(first->message.begin(), first->message.end())});
    sends().erase(first);
    return true;
  }

  Status die(const Fault& fault) {
    note(fault);
    is_dead_ = true;
    if (fault.signal) {
      ::kill(::getpid(), SIGKILL);
    } else if (plan_.die) {
      plan_.die();
    } else if (!inner_->vanish()) {
      return fail(Error{ErrorKind::kUnsupported,
                        "driver '" + inner_->name() + "' cannot vanish",
                        rank(),
                        rank(),
                        {}});
    }
    return fail(driver::lost_error(rank(), rank(), "its plan of faults says so"));
  }

  Status fail(Error error) {
    failed_ = std::move(error);
    return *failed_;
  }

  const FaultPlan plan_;
  int exchanges_ = 0;
  std::atomic<bool> is_dead_{false};  // read by `abort`, which may come from any thread
  std::optional<Error> failed_;
  std::deque<Bytes> copies_;  // of this exchange; a deque, so that they stay where they are
  std::deque<Bytes> old_copies_;
  std::vector<Held> held_;
  Exchange own_;
  std::unique_ptr<Driver> inner_;  // last: it goes before what it may still be sending
};

}  // namespace

std::unique_ptr<Driver> make_faulty(std::unique_ptr<Driver> inner, FaultPlan plan) {
  return std::make_unique<Faulty>(std::move(inner), std::move(plan));
}

}  // namespace zensync
