// The control connections of one rank: a thread, a heartbeat, the faults.
// Place: driver, level 4. The thread runs an io_context with all connections and the clock of the
// heartbeat; `watch_` judges what it hears, `board_` what all ranks call the fault. Locks are taken
// in no nested order but mutex_ alone; callbacks run without it.
#include "zensync/driver/control.hpp"

#include <asio/executor_work_guard.hpp>
#include <asio/post.hpp>
#include <asio/steady_timer.hpp>
#include <mutex>
#include <thread>

#include "common.hpp"
#include "control_peer.hpp"
#include "fault_board.hpp"
#include "mesh_connect.hpp"
#include "watch.hpp"
#include "zensync/base/blocked_signals.hpp"

namespace zensync {
namespace {

using namespace driver;  // NOLINT(google-build-using-namespace): our own private parts
using std::chrono::duration_cast;

/// How long a lost peer waits for a better explanation from the others.
constexpr milliseconds kGrace{100};
/// How long the end waits for the Rendezvous to take a fault.
constexpr milliseconds kLastCall{300};
/// How long the end waits for last words to be written.
constexpr milliseconds kLastWords{200};

class ControlMesh final : public Control, public ControlEvents {
 public:
  ControlMesh(const ControlOptions& options, std::shared_ptr<Rendezvous> rendezvous)
      : options_(options),
        board_(std::make_shared<FaultBoard>(rendezvous, options.mesh.name + "/fault")),
        rendezvous_(std::move(rendezvous)),
        context_(1),
        work_(context_.get_executor()),
        timer_(context_),
        peers_(static_cast<std::size_t>(options.mesh.size)),
        watch_(options.mesh.rank, options.mesh.size, {options.warn_after, options.silent_after}) {}

  ~ControlMesh() override {
    try {
      if (thread_.joinable()) {
        asio::post(context_, [this] { say_goodbye(); });
        thread_.join();
      }
    } catch (...) {  // no memory for the last post: the connections are cut instead
      context_.stop();
      if (thread_.joinable()) thread_.join();
    }
    for_each_peer([](ControlPeer& peer) { peer.finish(); });
    board_->leave(kLastCall);  // no fault is raised any more: the thread has ended
  }

  Status open() {
    const NativeMeshOptions& mesh = options_.mesh;
    const auto deadline = Clock::now() + mesh.timeout;
    if (!options_.has_connections) return open_without_connections(deadline);
    MeshAcceptor acceptor(context_.get_executor());
    if (Status status = listen_on(mesh.address, acceptor); !status.ok()) return status;
    asio::error_code error;
    const auto endpoint = acceptor.local_endpoint(error);
    if (error) return make_error(ErrorKind::kUnsupported, "no local port: " + error.message());
    auto records = exchange_records(mesh, endpoint.port(), *rendezvous_, deadline);
    if (!records.ok()) return records.error();
    auto sockets = connect_mesh(mesh, records.value(), acceptor, *rendezvous_, deadline);
    if (!sockets.ok()) return sockets.error();
    topology_ = topology_of(records.value().ranks);
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      const Rank peer{static_cast<int>(rank)};
      if (peer == mesh.rank) continue;
      peers_[rank] = std::make_unique<ControlPeer>(peer, std::move(sockets.value()[rank]), *this);
    }
    begin();
    return {};
  }

  const Topology& topology() const override { return topology_; }

  void start(Faults faults) override {
    asio::post(context_, [this, told = std::move(faults)]() mutable {
      faults_ = std::move(told);
      if (known_) faults_(*known_, is_settled_);
    });
  }

  Status fault() const override { return board_->fault(); }
  Status await_fault(milliseconds limit) override {
    return options_.has_connections ? board_->await(limit) : board_->fault();
  }

  void begin_job(const std::string& tensor) override {
    const std::lock_guard lock(mutex_);
    ++watch_.own().jobs_begun;
    watch_.own().exchange = 0;
    tensor_.assign(tensor);
  }
  void begin_exchange(const char* phase) override {
    {
      const std::lock_guard lock(mutex_);
      ++watch_.own().exchange;
      watch_.begin(WaitKind::kJob, tensor_, phase);
      if (!anybody_left_) return;
    }
    asio::post(context_, [this] { look_for_missing(); });
  }
  void end_job() override {
    const std::lock_guard lock(mutex_);
    watch_.own().jobs_done = watch_.own().jobs_begun;
    watch_.end(WaitKind::kJob);
  }
  void begin_dense(const std::string& tensor) override {
    {
      const std::lock_guard lock(mutex_);
      ++watch_.own().dense_begun;
      watch_.begin(WaitKind::kDense, tensor, "");
      if (!anybody_left_) return;
    }
    asio::post(context_, [this] { look_for_missing(); });
  }
  void end_dense() override {
    const std::lock_guard lock(mutex_);
    watch_.end(WaitKind::kDense);
  }

  void report(const Error& why) override { raise(reported_by(options_.mesh.rank, why), false); }
  Status settle(milliseconds limit) override { return board_->wait(limit); }

  Rank behind() const override {
    const std::lock_guard lock(mutex_);
    return watch_.behind();
  }

  std::vector<std::string> take_notices() override {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> taken;
    taken.swap(notices_);
    return taken;
  }

  void close_handles_in_child() noexcept override {
    for_each_peer([](ControlPeer& peer) { peer.close_handle_in_child(); });
  }

 private:
  template <class Action>
  void for_each_peer(Action action) {
    for (auto& peer : peers_) {
      if (peer) action(*peer);
    }
  }

  Status open_without_connections(Clock::time_point deadline) {
    auto records = exchange_records(options_.mesh, 0, *rendezvous_, deadline);
    if (!records.ok()) return records.error();
    topology_ = topology_of(records.value().ranks);
    for (int rank = 0; rank < options_.mesh.size; ++rank)
      watch_.left(Rank{rank}, false);  // not judged
    begin();
    return {};
  }

  /// Starts the thread: from here on peers that go are noticed, and this rank is heard.
  void begin() {
    last_tick_ = Clock::now();
    asio::post(context_, [this] {
      for_each_peer([](ControlPeer& peer) { peer.read(); });
      tick();
    });
    const BlockedSignals blocked;
    thread_ = std::thread([this] { run(); });
  }

  void run() {
    for (;;) {
      try {
        context_.run();
        return;
      } catch (const std::exception& error) {  // of a handler; the others go on
        report(make_error(ErrorKind::kInternal, std::string("control thread: ") + error.what(),
                          options_.mesh.rank));
      }
    }
  }

  void tick() {
    const auto now = Clock::now();
    const auto elapsed = std::min(duration_cast<milliseconds>(now - last_tick_), 2 * options_.beat);
    last_tick_ = now;
    Watch::Verdict verdict;
    BeatBytes beat;
    {
      const std::lock_guard lock(mutex_);
      verdict = watch_.tick(elapsed);
      beat = encode_beat(watch_.own());
      for (auto& notice : verdict.notices) notices_.push_back(std::move(notice));
    }
    for_each_peer([&](ControlPeer& peer) { peer.send(beat, true); });
    if (verdict.fault) raise(*verdict.fault, true);
    timer_.expires_after(options_.beat);
    timer_.async_wait([this](const asio::error_code& error) {
      if (!error) tick();
    });
  }

  /// Makes `why` the fault of this rank, if it is the first; tells all peers. is_told: whether the
  /// owner learns it before it is settled.
  void raise(const Error& why, bool is_told) {
    const bool is_first = board_->post(why, [this](const Error& truth) {
      asio::post(context_, [this, truth] {
        is_settled_ = true;
        tell(truth);
      });
    });
    if (!is_first) return;
    asio::post(context_, [this, why, is_told] {
      const std::vector<std::byte> frame = encode_abort(why);
      for_each_peer([&](ControlPeer& peer) { peer.send(frame, false); });
      if (is_told && !is_settled_) tell(why);  // the Rendezvous may have been faster
    });
  }

  /// On the thread.
  void tell(const Error& why) {
    known_ = why;
    if (faults_) faults_(why, is_settled_);
  }

  void on_beat(Rank from, const Progress& progress) override {
    const std::lock_guard lock(mutex_);
    watch_.heard(from, progress);
  }

  void on_abort(Rank from, Error why) override { raise(reported_by(from, std::move(why)), true); }

  void on_goodbye(Rank from) override {
    {
      const std::lock_guard lock(mutex_);
      watch_.left(from);
      anybody_left_ = true;
    }
    look_for_missing();
  }

  void on_lost(Rank from, const std::string& how) override {
    {
      const std::lock_guard lock(mutex_);
      watch_.left(from, false);
    }
    if (!board_->fault().ok()) return;
    const auto grace = std::make_shared<asio::steady_timer>(context_, kGrace);
    grace->async_wait([this, grace, from, how](const asio::error_code& error) {
      if (!error) raise_lost(from, how);
    });
  }

  void raise_lost(Rank from, const std::string& how) {
    Error why = lost_error(options_.mesh.rank, from, how);
    {
      const std::lock_guard lock(mutex_);
      why.tensor = watch_.awaited();
    }
    raise(why, true);
  }

  /// A rank that left in good order is a fault only where a job still needs it.
  void look_for_missing() {
    std::optional<Error> missing;
    {
      const std::lock_guard lock(mutex_);
      for (int rank = 0; rank < options_.mesh.size && !missing; ++rank) {
        missing = watch_.missed_by(Rank{rank});
      }
    }
    if (missing) raise(*missing, true);
  }

  /// On the thread, as its last work.
  void say_goodbye() {
    timer_.cancel();
    BeatBytes beat;
    {
      const std::lock_guard lock(mutex_);
      beat = encode_beat(watch_.own());
    }
    const PrefixBytes goodbye = encode_prefix(FrameKind::kGoodbye, 0);
    for_each_peer([&](ControlPeer& peer) {
      peer.send(beat, false);  // what it has done must be known when it is gone
      peer.send(goodbye, false);
    });
    bool unsent = false;
    for_each_peer([&](const ControlPeer& peer) { unsent = unsent || peer.has_unsent(); });
    work_.reset();
    if (!unsent) return context_.stop();
    timer_.expires_after(kLastWords);
    timer_.async_wait([this](const asio::error_code&) { context_.stop(); });
  }

  const ControlOptions options_;
  const std::shared_ptr<FaultBoard> board_;
  const std::shared_ptr<Rendezvous> rendezvous_;
  Topology topology_;
  Faults faults_;               // on the thread; empty before `start`
  std::optional<Error> known_;  // on the thread: what the owner was told, or would have been
  asio::io_context context_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  asio::basic_waitable_timer<Clock> timer_;
  std::vector<std::unique_ptr<ControlPeer>> peers_;  // empty at this rank's place
  Clock::time_point last_tick_;
  bool is_settled_ = false;  // on the thread: the owner knows what all ranks name

  mutable std::mutex mutex_;  // for what follows
  Watch watch_;
  std::string tensor_;  // of the current job
  std::vector<std::string> notices_;
  bool anybody_left_ = false;

  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<Control>> open_control(const ControlOptions& options,
                                              std::shared_ptr<Rendezvous> rendezvous) {
  const Rank self = options.mesh.rank;
  try {
    auto control = std::make_unique<ControlMesh>(options, std::move(rendezvous));
    if (Status status = control->open(); !status.ok()) return reported_by(self, status.error());
    return std::unique_ptr<Control>(std::move(control));
  } catch (const std::exception& error) {
    const std::string text = std::string("cannot open control connections: ") + error.what();
    return Error{ErrorKind::kUnsupported, text, self, self, {}};
  }
}

}  // namespace zensync
