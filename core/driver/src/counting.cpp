// A decorator that counts, from the outside, what passes through a driver.
// Place: driver, level 4. Owns the inner driver; used by the inner driver's thread, `abort` by any.
// It adds up lengths of messages plus prefixes and never asks the inner driver, so that a test can
// hold its figures against the inner `wire_count` and against a scheme's `traffic`. Sends count
// when they are handed over, receives when the exchange has succeeded. Errors are the inner
// driver's, unchanged.
#include "zensync/driver/counting.hpp"

#include <utility>

namespace zensync {
namespace {

class Counting final : public Driver {
 public:
  explicit Counting(std::unique_ptr<Driver> inner) : inner_(std::move(inner)) {}

  Rank rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const Topology& topology() const override { return inner_->topology(); }
  std::string name() const override { return "counting(" + inner_->name() + ")"; }

  Status exchange(const Exchange& exchange, Clock::time_point deadline) override {
    for (const Send& send : exchange.sends) {
      ++count_.sent_messages;
      count_.sent_bytes += kFramePrefixBytes + send.message.size();
    }
    Status status = inner_->exchange(exchange, deadline);
    if (!status.ok()) return status;
    for (const Recv& recv : exchange.recvs) {
      ++count_.received_messages;
      count_.received_bytes += kFramePrefixBytes + recv.into->size();
    }
    return status;
  }

  Status flush(Clock::time_point deadline) override { return inner_->flush(deadline); }
  void abort(const Error& why) override { inner_->abort(why); }
  void close_handles_in_child() noexcept override { inner_->close_handles_in_child(); }
  bool vanish() noexcept override { return inner_->vanish(); }
  WireCount wire_count() const override { return count_; }

 private:
  std::unique_ptr<Driver> inner_;
  WireCount count_;
};

}  // namespace

std::unique_ptr<Driver> make_counting(std::unique_ptr<Driver> inner) {
  return std::make_unique<Counting>(std::move(inner));
}

}  // namespace zensync
