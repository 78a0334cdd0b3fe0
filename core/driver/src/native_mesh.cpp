// The native mesh as a Driver: runs the connections of one rank inside `exchange` and `flush`.
// Place: driver, level 4. Owns the io_context and all connections; messages and Buffers are the
// caller's. `driving_` is held by whichever thread runs the io_context, normally the driver's own;
// `abort` from another thread leaves its reason, wakes the loop, and does the work itself only if
// nobody is in the loop. Fails with kDeadline, kPeerLost, kCorruptMessage, kInvalid, kCapacity (no
// memory) and any error that a peer aborted with. The first error stays: it is remembered and
// returned by every later call.
#include "zensync/driver/native_mesh.hpp"

#include <asio/executor_work_guard.hpp>
#include <asio/post.hpp>
#include <atomic>
#include <mutex>
#include <thread>

#include "common.hpp"
#include "mesh_connect.hpp"

namespace zensync {
namespace {

using namespace driver;  // NOLINT(google-build-using-namespace): our own private parts

/// How long an abort may take to reach the systems of all peers.
constexpr std::chrono::milliseconds kAbortLimit{200};
/// How long a lost peer waits for a better explanation from the others.
constexpr std::chrono::milliseconds kGrace{50};
constexpr std::chrono::microseconds kDrainSleep{200};

class NativeMesh final : public Driver {
 public:
  explicit NativeMesh(const NativeMeshOptions& options)
      : options_(options),
        memory_(2 * static_cast<std::size_t>(options.size)),
        context_(1),
        work_(context_.get_executor()),
        peers_(static_cast<std::size_t>(options.size)) {
    shared_.self = options.rank;
  }

  ~NativeMesh() override {
    try {
      const std::lock_guard lock(driving_);
      if (dead_) {
        broadcast(*dead_);  // a silent end would leave the peers guessing
      } else {
        say_goodbye();
      }
    } catch (...) {  // nothing to report to any more; the sockets close in any case
    }
  }

  Status open(Rendezvous& rendezvous) {
    const auto deadline = Clock::now() + options_.timeout;
    if (options_.size == 1) {
      topology_ = flat_topology(1);
      return {};
    }
    MeshAcceptor acceptor(context_.get_executor());
    if (Status status = listen_on(options_.address, acceptor); !status.ok()) return status;
    asio::error_code error;
    const auto endpoint = acceptor.local_endpoint(error);
    if (error) return make_error(ErrorKind::kUnsupported, "no local port: " + error.message());
    auto records = exchange_records(options_, endpoint.port(), rendezvous, deadline);
    if (!records.ok()) return records.error();
    auto sockets = connect_mesh(options_, records.value(), acceptor, rendezvous, deadline);
    if (!sockets.ok()) return sockets.error();
    topology_ = topology_of(records.value().ranks);
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      const Rank peer{static_cast<int>(rank)};
      if (peer == options_.rank) continue;
      peers_[rank] =
          std::make_unique<MeshPeer>(peer, std::move(sockets.value()[rank]), shared_,
                                     std::span<HandlerMemory, 2>(memory_.data() + 2 * rank, 2));
      peers_[rank]->start();
    }
    return {};
  }

  Rank rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  const Topology& topology() const override { return topology_; }
  std::string name() const override { return "native"; }
  WireCount wire_count() const override { return shared_.count; }

  Status exchange(const Exchange& exchange, Clock::time_point deadline) override {
    return guarded([&] {
      Status status = check_exchange(exchange, options_.rank, options_.size);
      if (!status.ok()) {
        shared_.fail(status.error());
      } else {
        post(exchange);
        drive(deadline, [this] { return shared_.open_recvs == 0 && shared_.old_sends == 0; });
      }
    });
  }

  Status flush(Clock::time_point deadline) override {
    return guarded(
        [&] { drive(deadline, [this] { return shared_.old_sends + shared_.new_sends == 0; }); });
  }

  void close_handles_in_child() noexcept override {
    for_each_peer([](MeshPeer& peer) { peer.close_handle_in_child(); });
  }

  void abort(const Error& why) override {
    try {
      {
        const std::lock_guard lock(reason_mutex_);
        if (!reason_) reason_ = reported_by(options_.rank, why);
      }
      abort_asked_.store(true, std::memory_order_release);
      asio::post(context_, [] {});  // wakes a loop that waits for sockets
      const std::lock_guard lock(driving_);
      // Who was in the loop has seen the reason by now, unless it had just finished.
      if (!dead_) dead_ = asked_reason();
      broadcast(asked_reason());
    } catch (...) {  // no memory: the destructor still closes all connections
    }
  }

  bool vanish() noexcept override {
    try {
      const std::lock_guard lock(driving_);
      if (!dead_) dead_ = lost_error(options_.rank, options_.rank, "it vanished");
      closed_ = true;  // no farewell
      for_each_peer([](MeshPeer& peer) { peer.close(); });
      return true;
    } catch (...) {  // no memory for the text of the error
      return false;
    }
  }

 private:
  /// Runs `work` as the one thread that drives, and turns what it left in `shared_` into the
  /// result.
  template <class Work>
  Status guarded(Work work) {
    const std::lock_guard lock(driving_);
    if (dead_) return *dead_;
    try {
      work();
    } catch (const std::bad_alloc&) {
      shared_.fail(
          Error{ErrorKind::kCapacity, "no memory for a message", options_.rank, options_.rank, {}});
    } catch (const std::exception& error) {
      shared_.fail(Error{ErrorKind::kInternal, error.what(), options_.rank, options_.rank, {}});
    }
    if (!shared_.failure) return {};
    dead_ = reported_by(options_.rank, *shared_.failure);
    try {
      for_each_peer([](MeshPeer& peer) { peer.detach(); });
      // Every rank passes an abort on: its first sender may not have reached all of them.
      if (shared_.abort_received || aborting_) broadcast(*dead_);
    } catch (const std::exception&) {  // no memory for farewells: close without
      for_each_peer([](MeshPeer& peer) { peer.close(); });
    }
    return *dead_;
  }

  template <class Action>
  void for_each_peer(Action action) {
    for (auto& peer : peers_) {
      if (peer) action(*peer);
    }
  }

  void post(const Exchange& exchange) {
    ++shared_.sequence;
    shared_.old_sends += shared_.new_sends;
    shared_.new_sends = 0;
    for (const Recv& recv : exchange.recvs) peer(recv.from).post_recv(recv);
    for (const Send& send : exchange.sends) peer(send.to).post_send(send.message);
    // In the scheme's order, which spreads ranks over receivers.
    for (const Send& send : exchange.sends) peer(send.to).write();
    for (const Recv& recv : exchange.recvs) {
      if (!shared_.failure) peer(recv.from).read_staged();
    }
  }

  MeshPeer& peer(Rank rank) { return *peers_[static_cast<std::size_t>(rank.value)]; }

  template <class Done>
  void drive(Clock::time_point deadline, Done done) {
    bool in_grace = false;
    bool last_look = false;
    for (;;) {
      if (abort_asked_.load(std::memory_order_acquire)) {
        shared_.failure = asked_reason();
        aborting_ = true;
        return;
      }
      if (shared_.failure) {
        if (shared_.abort_received || shared_.failure->kind != ErrorKind::kPeerLost) return;
        if (!in_grace && !others_left()) return;
        if (!in_grace) deadline = Clock::now() + kGrace;
        in_grace = true;
      } else if (done()) {
        return;
      }
      if (context_.run_one_until(deadline) != 0 || Clock::now() < deadline) continue;
      // A process that was stopped past its deadline may have everything waiting in its sockets.
      if (!last_look && context_.poll() != 0) {
        last_look = true;
        continue;
      }
      if (!shared_.failure) shared_.fail(late());
      return;
    }
  }

  bool others_left() {
    bool left = false;
    for_each_peer([&](const MeshPeer& peer) { left = left || !peer.ended(); });
    return left;
  }

  Error late() {
    std::vector<int> delivering;
    std::vector<int> taking;
    for_each_peer([&](const MeshPeer& peer) {
      if (peer.has_open_recvs()) delivering.push_back(peer.rank().value);
      if (peer.has_old_sends()) taking.push_back(peer.rank().value);
    });
    if (delivering.empty() && taking.empty()) {  // a flush waits for the newest messages too
      for_each_peer([&](const MeshPeer& peer) {
        if (peer.has_sends()) taking.push_back(peer.rank().value);
      });
    }
    return deadline_error(options_.rank, delivering, taking);
  }

  Error asked_reason() {
    const std::lock_guard lock(reason_mutex_);
    return *reason_;
  }

  /// Tells all peers why, as far as that succeeds in time, and closes all connections. Only once.
  void broadcast(const Error& why) {
    if (closed_) return;
    closed_ = true;
    const auto limit = Clock::now() + kAbortLimit;
    const std::vector<std::byte> frame = encode_abort(why);
    for_each_peer([&](MeshPeer& peer) { peer.begin_farewell(frame); });
    bool written = false;
    while (!written) {
      written = true;
      for_each_peer([&](MeshPeer& peer) { written = written && peer.farewell_written(); });
      if (!written && context_.run_one_until(limit) == 0 && Clock::now() >= limit) break;
    }
    for_each_peer([](MeshPeer& peer) { peer.shutdown_send(); });
    // Closing with bytes unread, or while more come in, resets the connection and can destroy what
    // has not arrived yet: so first drop what comes in until the peers' systems have everything.
    bool drained = false;
    while (!drained && Clock::now() < limit) {
      drained = true;
      for_each_peer([&](MeshPeer& peer) { drained = peer.drain() && drained; });
      if (!drained) std::this_thread::sleep_for(kDrainSleep);
    }
    for_each_peer([](MeshPeer& peer) { peer.close(); });
  }

  /// The end in good order. The system delivers what is still on its way; nothing may be left
  /// unread.
  void say_goodbye() {
    for_each_peer([](MeshPeer& peer) {
      peer.send_goodbye();
      peer.shutdown_send();
      peer.drain();
      peer.close();
    });
  }

  const NativeMeshOptions options_;
  Topology topology_;
  MeshShared shared_;
  // Declared in this order because sockets need the context, and the context's end needs the
  // memory.
  std::vector<HandlerMemory> memory_;
  asio::io_context context_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  std::vector<std::unique_ptr<MeshPeer>> peers_;  // empty at this rank's place

  std::mutex driving_;
  std::optional<Error> dead_;
  bool aborting_ = false;  // `dead_` is the reason given to `abort` here
  bool closed_ = false;

  std::mutex reason_mutex_;
  std::optional<Error> reason_;
  std::atomic<bool> abort_asked_{false};
};

Status check_options(const NativeMeshOptions& options) {
  if (options.size >= 1 && options.rank.value >= 0 && options.rank.value < options.size) return {};
  return make_error(ErrorKind::kInvalid, "no such rank: " + std::to_string(options.rank.value) +
                                             " of " + std::to_string(options.size));
}

}  // namespace

Result<std::unique_ptr<Driver>> open_native_mesh(const NativeMeshOptions& options,
                                                 Rendezvous& rendezvous) {
  try {
    if (Status status = check_options(options); !status.ok()) return status.error();
    auto mesh = std::make_unique<NativeMesh>(options);
    if (Status status = mesh->open(rendezvous); !status.ok()) {
      return reported_by(options.rank, status.error());
    }
    return std::unique_ptr<Driver>(std::move(mesh));
  } catch (const std::exception& error) {
    return Error{ErrorKind::kUnsupported,
                 std::string("cannot open a native mesh: ") + error.what(),
                 options.rank,
                 options.rank,
                 {}};
  }
}

}  // namespace zensync
