// The queue and its thread. Place: engine.
// Jobs run in submission order. The first error is final: it is told to all peers, and every later
// job ends with it at once, so that no future stays open.
#include "zensync/engine/engine.hpp"

#include <atomic>
#include <deque>
#include <exception>
#include <stdexcept>
#include <thread>

#include "job.hpp"
#include "runner.hpp"
#include "zensync/base/env.hpp"
#include "zensync/kernels/kernels.hpp"

namespace zensync {
namespace {

class ThreadedEngine final : public Engine {
 public:
  ThreadedEngine(std::unique_ptr<Driver> driver, EngineOptions options)
      : failed_(kernels::select(env().cpu_target).status()),
        rank_(driver->rank()),
        driver_(std::move(driver)),
        runner_(*driver_, options),
        thread_([this] { work(); }) {
    if (!failed_.ok()) driver_->abort(failed_.error());  // kernels that were asked for cannot run
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
        abort(make_error(
            ErrorKind::kPeerLost,
            "rank " + std::to_string(rank_.value) + " closed its State while jobs were in flight",
            rank_));
      }
    }
    std::lock_guard join_lock(join_mutex_);
    if (thread_.joinable()) thread_.join();
    // The connections go with the State, so that a peer which still calls learns it at once.
    std::shared_ptr<Driver> gone;
    std::lock_guard lock(mutex_);
    gone.swap(driver_);
  }

  void abort(const Error& why) override {
    std::shared_ptr<Driver> driver;
    {
      std::lock_guard lock(mutex_);
      if (failed_.ok()) failed_ = why;
      driver = driver_;
    }
    if (driver != nullptr) driver->abort(why);
    wake_.notify_all();
  }

 private:
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

  Status run_guarded(JobState& job) {
    {
      std::lock_guard lock(mutex_);
      if (!failed_.ok()) return failed_;
    }
    Status status;
    try {
      status = runner_.run(job);
    } catch (const std::bad_alloc&) {
      status = make_error(ErrorKind::kCapacity, "out of memory; set max_bytes");
    } catch (const std::length_error&) {
      status = make_error(ErrorKind::kCapacity, "a size beyond what memory can hold");
    } catch (const std::exception& error) {
      status = make_error(ErrorKind::kInternal, error.what());
    }
    if (!status.ok()) {
      if (status.error().rank.value < 0) status.error().rank = rank_;
      if (status.error().tensor.empty()) status.error().tensor = job.spec.name;
    }
    if (!status.ok()) {
      std::lock_guard lock(mutex_);
      if (failed_.ok()) failed_ = status;
    }
    if (!status.ok()) driver_->abort(status.error());
    return status;
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
  std::shared_ptr<Driver> driver_;  ///< null once closed; the thread has ended then
  Runner runner_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Engine> make_engine(std::unique_ptr<Driver> driver, EngineOptions options) {
  return std::make_unique<ThreadedEngine>(std::move(driver), options);
}

}  // namespace zensync
