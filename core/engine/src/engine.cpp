// The queue and its thread. Place: engine.
// Jobs run in submission order. The first error is final: it is told to all peers, and every later
// job ends with it at once, so that no future stays open. Nothing that fails while a job fails ends
// the thread: a driver or control that throws is passed over, and where memory for the error is
// missing too, a short one takes its place.
#include "zensync/engine/engine.hpp"

#include <atomic>
#include <deque>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

#include "job.hpp"
#include "runner.hpp"
#include "zensync/base/blocked_signals.hpp"
#include "zensync/base/env.hpp"
#include "zensync/kernels/kernels.hpp"

namespace zensync {
namespace {

/// An error that needs no memory: so short a text is kept inside the string.
Error out_of_memory() noexcept {
  Error error;
  error.kind = ErrorKind::kCapacity;
  error.message = "out of memory";
  return error;
}

/// What `action` returns, or the error that stands for what it throws.
template <class Action>
Status guarded(Action action) noexcept {
  try {
    try {
      return action();
    } catch (const std::bad_alloc&) {
      return make_error(ErrorKind::kCapacity, "out of memory; set max_bytes");
    } catch (const std::length_error&) {
      return make_error(ErrorKind::kCapacity, "a size beyond what memory can hold");
    } catch (const std::exception& error) {
      return make_error(ErrorKind::kInternal, error.what());
    } catch (...) {
      return make_error(ErrorKind::kInternal, "an exception of no known type");
    }
  } catch (...) {  // no memory for that text
    return out_of_memory();
  }
}

/// For steps of giving up: those that follow are taken all the same.
template <class Action>
void attempt(Action action) noexcept {
  try {
    action();
  } catch (...) {  // there is a first error already, and that is the one to tell
    return;
  }
}

class ThreadedEngine final : public Engine {
 public:
  ThreadedEngine(std::unique_ptr<Driver> driver, EngineOptions options,
                 std::unique_ptr<Control> control)
      : failed_(kernels::select(env().cpu_target).status()),
        rank_(driver->rank()),
        driver_(std::move(driver)),
        control_(std::move(control)),
        runner_(*driver_, options, control_.get()) {
    const BlockedSignals blocked;
    if (control_) control_->start([this](const Error& why, bool final) { told(why, final); });
    thread_ = std::thread([this] { work(); });
    // Kernels that were asked for cannot run. A copy: the control's thread may set `failed_` now.
    if (const Status unusable = status(); !unusable.ok()) abort(unusable.error());
  }

  ~ThreadedEngine() override { close(std::chrono::milliseconds(0)); }

  std::shared_ptr<Job> submit(JobSpec spec) override {
    auto job = std::make_shared<JobState>();
    job->spec = std::move(spec);
    return enqueue(std::move(job));
  }

  std::shared_ptr<Job> agree(std::vector<DenseItem> items) override {
    auto job = std::make_shared<JobState>();
    job->items = std::move(items);
    job->is_agreement = true;
    return enqueue(std::move(job));
  }

  bool would_be_dense(const std::string& name, const TensorSpec& spec, bool starts_dense) override {
    return runner_.would_be_dense(name, spec, starts_dense);
  }

  Status status() const override {
    std::lock_guard lock(mutex_);
    return failed_;
  }

  Status settled() noexcept override {
    const Status known = guarded([this] { return status(); });
    return known.ok() ? known : fail(known.error());
  }

  WireCount wire_count() const override {
    std::lock_guard lock(mutex_);
    return wire_count_;
  }

  void close(std::chrono::milliseconds timeout) override {
    {
      std::unique_lock lock(mutex_);
      closing_ = true;
      wake_.notify_all();
      if (!idle_.wait_for(lock, timeout, [this] { return queue_.empty() && !busy_; })) {
        lock.unlock();
        const Status why = guarded([this] { return Status(closed_error()); });
        abort(why.error());
      }
    }
    std::lock_guard join_lock(join_mutex_);
    if (thread_.joinable()) thread_.join();
    // The connections go with the State, so that a peer which still calls learns it at once.
    std::shared_ptr<Driver> gone;
    std::shared_ptr<Control> silent;
    {
      std::lock_guard lock(mutex_);
      gone.swap(driver_);
      silent.swap(control_);
    }
    silent.reset();
    if (aborting_.joinable()) aborting_.join();
  }

  void abort(const Error& why) noexcept override {
    give_up(why);
    static_cast<void>(fail(why));
    wake_.notify_all();
  }

  void begin_dense(const std::string& name) override {
    if (const auto control = held(control_)) control->begin_dense(name);
  }
  void end_dense() override {
    if (const auto control = held(control_)) control->end_dense();
  }
  std::vector<std::string> take_notices() override {
    const auto control = held(control_);
    return control ? control->take_notices() : std::vector<std::string>();
  }
  void close_handles_in_child() noexcept override {
    if (driver_) driver_->close_handles_in_child();
    if (control_) control_->close_handles_in_child();
  }

 private:
  template <class T>
  std::shared_ptr<T> held(const std::shared_ptr<T>& member) const {
    std::lock_guard lock(mutex_);
    return member;
  }

  /// On the control's thread: a peer reported or caused a fault, or all ranks agreed on its name.
  /// An abort may wait (the torch driver's for the GIL), which heartbeats must not.
  void told(const Error& why, bool final) {
    std::lock_guard lock(mutex_);
    if (failed_.ok() || final) failed_ = why;
    if (driver_ == nullptr || aborting_.joinable()) return;
    const BlockedSignals blocked;
    aborting_ =
        std::thread([driver = driver_, why] { attempt([&driver, &why] { driver->abort(why); }); });
  }

  /// Makes `own`, or what all ranks call it, the error of this engine; returns that.
  Status fail(const Error& own) noexcept {
    Status settled;
    attempt([&] {
      if (const auto control = held(control_)) settled = control->settle(kSettleLimit);
    });
    std::lock_guard lock(mutex_);
    if (!settled.ok()) {
      failed_ = std::move(settled);
    } else if (failed_.ok()) {
      failed_ = guarded([&] { return Status(own); });
    }
    return guarded([this] { return failed_; });
  }

  std::shared_ptr<Job> enqueue(std::shared_ptr<JobState> job) {
    Status refused;
    {
      std::lock_guard lock(mutex_);
      if (!failed_.ok()) {
        refused = earlier_error();
      } else if (closing_) {
        refused = make_error(ErrorKind::kInvalid, "the State is closed; make a new one");
      } else {
        queue_.push_back(job);
      }
    }
    if (refused.ok()) {
      wake_.notify_one();
    } else {
      job->end(std::move(refused));
    }
    return job;
  }

  /// What a job gets that comes after the error; the lock is held.
  Status earlier_error() const {
    Error error = failed_.error();
    error.message = "this State stopped after an earlier error, make a new one: " + error.message;
    return error;
  }

  /// The next job, or null when there will be none. Marks the engine busy.
  std::shared_ptr<JobState> take() {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [this] { return !queue_.empty() || closing_; });
    if (queue_.empty()) return nullptr;
    auto job = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    return job;
  }

  Error closed_error() const {
    return make_error(
        ErrorKind::kPeerLost,
        "rank " + std::to_string(rank_.value) + " closed its State while jobs were in flight",
        rank_);
  }

  /// Runs a job; its error is told to the peers and is final.
  Status run_guarded(JobState& job) noexcept {
    Status own = guarded([this] { return status(); });
    if (!own.ok()) return fail(own.error());
    own = guarded([&] { return runner_.run(job); });
    if (own.ok()) return own;
    Error& error = own.error();
    if (error.rank.value < 0) error.rank = rank_;
    if (error.tensor.empty()) attempt([&] { error.tensor = job.spec.name; });
    if (error.kind == ErrorKind::kPeerLost && error.culprit != rank_) ask_why();
    give_up(error);
    return fail(error);
  }

  /// A peer that dropped its connections may live, and have done so because of another rank. This
  /// one must not be the first to blame it: the control connections know who is gone.
  void ask_why() noexcept {
    attempt([&] {
      if (const auto control = held(control_)) static_cast<void>(control->await_fault(kAskLimit));
    });
  }

  /// Tells the peers; neither of the two ways is left out because the other throws.
  void give_up(const Error& why) noexcept {
    attempt([&] {
      if (const auto control = held(control_)) control->report(why);
    });
    attempt([&] {
      if (const auto driver = held(driver_)) driver->abort(why);
    });
  }

  void work() {
    while (auto job = take()) {
      Status status = run_guarded(*job);
      const WireCount count = driver_->wire_count();
      {
        std::lock_guard lock(mutex_);
        busy_ = false;
        wire_count_ = count;
      }
      job->end(std::move(status));
      idle_.notify_all();
    }
  }

  mutable std::mutex mutex_;
  std::mutex join_mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::deque<std::shared_ptr<JobState>> queue_;
  bool closing_ = false;
  bool busy_ = false;
  Status failed_;
  WireCount wire_count_;
  Rank rank_;
  std::shared_ptr<Driver> driver_;    ///< null once closed; the thread has ended then
  std::shared_ptr<Control> control_;  ///< may be null; as driver_
  Runner runner_;
  std::thread aborting_;  ///< started by `told`, joined by `close`
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Engine> make_engine(std::unique_ptr<Driver> driver, EngineOptions options,
                                    std::unique_ptr<Control> control) {
  return std::make_unique<ThreadedEngine>(std::move(driver), options, std::move(control));
}

}  // namespace zensync
