// Control connections of n ranks in one process, what each was told, and a Rendezvous that fails.
// Place: tests of control connections and engines. A ControlWorld owns its ranks, and the folder
// in which they meet; with an impostor its last rank is a plain socket (impostor.hpp).
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <optional>

#include "impostor.hpp"
#include "worlds.hpp"
#include "zensync/driver/control.hpp"

namespace zensync::test {

using std::chrono::milliseconds;

/// Enough for anything that does not hang.
inline constexpr milliseconds kEnough{10000};

/// Listens to the faults of one rank; outlives its control.
class Ear {
 public:
  Control::Faults listener() {
    return [this](const Error& why, bool final) {
      const std::lock_guard lock(mutex_);
      EXPECT_FALSE(final_) << "told " << why.message << " after the final fault";
      last_ = why;
      final_ = final;
      told_.notify_all();
    };
  }
  bool heard() const {
    const std::lock_guard lock(mutex_);
    return last_.has_value();
  }
  /// The fault that all ranks name; empty if it did not come in time.
  std::optional<Error> truth(milliseconds limit = kEnough) {
    std::unique_lock lock(mutex_);
    if (!told_.wait_for(lock, limit, [this] { return final_; })) return {};
    return last_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable told_;
  std::optional<Error> last_;
  bool final_ = false;
};

inline ControlOptions control_options(int rank, int size) {
  ControlOptions options;
  options.mesh = mesh_options(rank, size);
  options.mesh.name = "control";
  options.beat = 20ms;
  return options;
}

/// Limits that a test can wait for.
inline void shorten(ControlOptions& options) {
  options.warn_after = 100ms;
  options.silent_after = 400ms;
}

/// What a job of `control` does first: it waits in its first exchange.
inline void start_job(Control& control, const std::string& tensor, const char* phase = "push") {
  control.begin_job(tensor);
  control.begin_exchange(phase);
}

struct ControlPlan {
  bool has_impostor = false;
  int receive_bytes = 0;                             ///< of the impostor
  std::function<void(ControlOptions&)> change = {};  ///< of every rank's options
  std::function<std::shared_ptr<Rendezvous>(std::shared_ptr<Rendezvous>)> wrap = {};
};

class ControlWorld {
 public:
  explicit ControlWorld(int size, const ControlPlan& plan = {})
      : ears_(static_cast<std::size_t>(size)), controls_(static_cast<std::size_t>(size)) {
    on_ranks(size, [&](int rank) {
      std::shared_ptr<Rendezvous> files = make_file_rendezvous(folder_.path());
      if (plan.has_impostor && rank == size - 1) {
        impostor_.emplace(*files, "control", size, plan.receive_bytes);
        return;
      }
      ControlOptions options = control_options(rank, size);
      if (plan.change) plan.change(options);
      auto opened = open_control(options, plan.wrap ? plan.wrap(files) : files);
      ASSERT_TRUE(opened.ok()) << opened.error().message;
      opened.value()->start(ear(rank).listener());
      controls_[static_cast<std::size_t>(rank)] = std::move(opened.value());
    });
  }

  int size() const { return static_cast<int>(controls_.size()); }
  /// Ranks that are no impostors.
  int real_size() const { return size() - (impostor_ ? 1 : 0); }
  Control& at(int rank) { return *controls_[static_cast<std::size_t>(rank)]; }
  Ear& ear(int rank) { return ears_[static_cast<std::size_t>(rank)]; }
  Impostor& impostor() { return *impostor_; }
  /// The rank closes its control connections in good order; how long that took.
  Clock::duration close(int rank) {
    const auto start = Clock::now();
    controls_[static_cast<std::size_t>(rank)].reset();
    return Clock::now() - start;
  }
  bool is_quiet() const {
    return std::none_of(ears_.begin(), ears_.end(), [](const Ear& ear) { return ear.heard(); });
  }

  /// The fault that all real ranks name; empty, with a failure noted, when they do not agree, or
  /// one of them does not learn it within `limit`.
  std::optional<Error> common_fault(milliseconds limit = kEnough) {
    const auto until = Clock::now() + limit;
    std::optional<Error> first;
    for (int rank = 0; rank < real_size(); ++rank) {
      const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
      const auto truth = ear(rank).truth(std::max(left, milliseconds{0}));
      if (!truth) {
        ADD_FAILURE() << "rank " << rank << " learns of no fault in time";
        return {};
      }
      const Status settled = at(rank).settle(0ms);
      EXPECT_TRUE(!settled.ok() && same_error(settled.error(), *truth)) << "rank " << rank;
      if (!first) first = truth;
      EXPECT_TRUE(same_error(*first, *truth)) << first->message << " / " << truth->message;
    }
    return first;
  }

  static bool same_error(const Error& a, const Error& b) {
    return a.kind == b.kind && a.message == b.message && a.rank == b.rank &&
           a.culprit == b.culprit && a.tensor == b.tensor;
  }

 private:
  TemporaryFolder folder_;
  std::vector<Ear> ears_;
  std::vector<std::unique_ptr<Control>> controls_;
  std::optional<Impostor> impostor_;
};

/// Lets nobody through until it is opened.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

/// Good for opening a mesh; its compare_set calls `instead`.
class OddRendezvous final : public Rendezvous {
 public:
  using Instead = std::function<Result<std::string>()>;
  OddRendezvous(std::shared_ptr<Rendezvous> inner, Instead instead)
      : inner_(std::move(inner)), instead_(std::move(instead)) {}
  Status set(const std::string& key, const std::string& value) override {
    return inner_->set(key, value);
  }
  Result<std::string> wait(const std::string& key, milliseconds timeout) override {
    return inner_->wait(key, timeout);
  }
  Result<std::string> get(const std::string& key) override { return inner_->get(key); }
  Result<std::string> compare_set(const std::string&, const std::string&,
                                  const std::string&) override {
    return instead_();
  }

 private:
  std::shared_ptr<Rendezvous> inner_;
  Instead instead_;
};

inline ControlPlan odd_plan(const OddRendezvous::Instead& instead) {
  ControlPlan plan;
  plan.wrap = [instead](std::shared_ptr<Rendezvous> inner) {
    return std::make_shared<OddRendezvous>(std::move(inner), instead);
  };
  return plan;
}

}  // namespace zensync::test
