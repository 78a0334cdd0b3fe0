// A decorator that notes what a driver did and when.
// Place: driver, level 4. Owns the inner driver, shares the Trace. An event is added when its call
// has ended, so a call that hangs shows by the lack of one. Errors are the inner driver's,
// unchanged. The Trace takes a lock for each event; `abort` may come from any thread.
#include "zensync/driver/tracing.hpp"

#include <algorithm>
#include <exception>
#include <utility>

namespace zensync {
namespace {

std::int64_t now_ns() {
  const auto now = Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void make_set(std::vector<int>& ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
}

class Tracing final : public Driver {
 public:
  Tracing(std::unique_ptr<Driver> inner, TraceSink sink)
      : inner_(std::move(inner)), sink_(std::move(sink)) {}

  Rank rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const Topology& topology() const override { return inner_->topology(); }
  std::string name() const override { return "tracing(" + inner_->name() + ")"; }
  WireCount wire_count() const override { return inner_->wire_count(); }
  void close_handles_in_child() noexcept override { inner_->close_handles_in_child(); }
  bool vanish() noexcept override { return inner_->vanish(); }

  Status exchange(const Exchange& exchange, Clock::time_point deadline) override {
    TraceEvent event = begin(TraceKind::kExchange);
    event.phase = exchange.phase;
    for (const Send& send : exchange.sends) {
      event.sent_bytes += kFramePrefixBytes + send.message.size();
      event.sent_to.push_back(send.to.value);
    }
    Status status = inner_->exchange(exchange, deadline);
    for (const Recv& recv : exchange.recvs) {
      if (status.ok()) event.received_bytes += kFramePrefixBytes + recv.into->size();
      event.awaited_from.push_back(recv.from.value);
    }
    make_set(event.sent_to);
    make_set(event.awaited_from);
    end(std::move(event), status);
    return status;
  }

  Status flush(Clock::time_point deadline) override {
    TraceEvent event = begin(TraceKind::kFlush);
    Status status = inner_->flush(deadline);
    end(std::move(event), status);
    return status;
  }

  void abort(const Error& why) override {
    TraceEvent event = begin(TraceKind::kAbort);
    inner_->abort(why);
    end(std::move(event), why);
  }

 private:
  TraceEvent begin(TraceKind kind) const {
    TraceEvent event;
    event.kind = kind;
    event.rank = inner_->rank();
    event.start_ns = now_ns();
    return event;
  }

  void end(TraceEvent event, const Status& status) {
    event.end_ns = now_ns();
    event.status = status;
    sink_->add(std::move(event));
  }

  std::unique_ptr<Driver> inner_;
  TraceSink sink_;
};

}  // namespace

void Trace::add(TraceEvent event) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (events_.size() < most_events_) {
      events_.push_back(std::move(event));
    } else {
      ++left_out_;
    }
  } catch (const std::exception&) {  // no memory: a trace must not fail what it watches
    ++left_out_;
  }
}

std::vector<TraceEvent> Trace::events() const {
  const std::lock_guard lock(mutex_);
  return events_;
}

std::uint64_t Trace::left_out() const {
  const std::lock_guard lock(mutex_);
  return left_out_;
}

const char* trace_name(TraceKind kind) {
  constexpr const char* kNames[] = {"exchange", "flush", "abort"};
  return kNames[static_cast<int>(kind)];
}

std::unique_ptr<Driver> make_tracing(std::unique_ptr<Driver> inner, TraceSink sink) {
  return std::make_unique<Tracing>(std::move(inner), std::move(sink));
}

}  // namespace zensync
