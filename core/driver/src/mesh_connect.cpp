// Opens the connections of a native mesh: listener, connects, accepts, handshakes.
// Place: driver, level 4, private. All on the caller's thread, inside `connect_mesh`; a Link (one
// half-open connection) is owned by its pending handlers, the Connector by `connect_mesh`, and the
// loop at the end lets every handler go before the Connector does. The connecting side says hello
// first. Whoever sends something else, a wrong token, or nothing for 2 s is a stranger: it is
// closed without a word and accepting goes on. A hello with the right token but other settings is
// kMismatch, and is answered, so that both sides know. A rank listens before it publishes itself
// and until it has all its connections, so one that refuses them for a while is gone or cut off:
// also ranks that are to connect to this one are tried.
#include "mesh_connect.hpp"

#include <fcntl.h>

#include <algorithm>
#include <asio/read.hpp>
#include <asio/steady_timer.hpp>
#include <asio/write.hpp>

#include "common.hpp"

namespace zensync::driver {
namespace {

constexpr std::chrono::milliseconds kSilence{2000};
constexpr std::chrono::milliseconds kRetry{50};
constexpr std::chrono::milliseconds kCheck{100};
constexpr std::chrono::milliseconds kProbe{500};  // between two tries of a rank that is to connect
constexpr std::chrono::milliseconds kRefused{1500};  // then it will not be reached any more
constexpr std::size_t kMaxStrangers = 64;  // half-open at a time, above the ranks that are due

using asio::ip::tcp;

struct Link {
  Link(const asio::io_context::executor_type& executor, Rank peer_rank)
      : socket(executor), timer(executor), peer(peer_rank) {}
  MeshSocket socket;
  asio::basic_waitable_timer<Clock, asio::wait_traits<Clock>, asio::io_context::executor_type>
      timer;
  Rank peer;                                 // −1: accepted, not yet known
  std::optional<Clock::time_point> refused;  // since when
  HelloBytes theirs{};
  HelloBytes ours{};
};
using LinkPtr = std::shared_ptr<Link>;

class Connector {
 public:
  Connector(const NativeMeshOptions& options, const MeshRecords& records, MeshAcceptor& acceptor,
            Rendezvous& rendezvous)
      : options_(options), records_(records), acceptor_(acceptor), rendezvous_(rendezvous) {
    const MeshRecord& own = records.ranks[index(options.rank)];
    ours_ = Hello{kWireVersion,  options.size,         options.rank.value,
                  records.token, settings_digest(own), host_digest(own)};
    for (int rank = 0; rank < options.size; ++rank) sockets_.emplace_back(acceptor.get_executor());
  }

  Result<std::vector<MeshSocket>> run(Clock::time_point last) {
    const auto deadline = std::min(last, Clock::now() + options_.connect_timeout);
    auto& context = acceptor_.get_executor().context();
    for (int rank = 0; rank < options_.size; ++rank) {
      if (rank == options_.rank.value) continue;
      auto link = std::make_shared<Link>(acceptor_.get_executor(), Rank{rank});
      if (rank < options_.rank.value) {
        connect(link);
      } else {
        probe_later(link);
      }
    }
    accept();
    auto next_check = Clock::now() + kCheck;
    while (!failure_ && !complete()) {
      context.run_one_until(std::min(deadline, next_check));
      const auto now = Clock::now();
      if (now < std::min(deadline, next_check)) continue;
      next_check = now + kCheck;
      if (Status status = rendezvous_.check(); !status.ok()) {
        failure_ = status.error();
      } else if (now >= deadline && !failure_ && !complete()) {
        failure_ = deadline < last ? unreachable(missing(), options_.connect_timeout) : late();
      }
    }
    done_ = true;
    asio::error_code ignored;
    acceptor_.close(ignored);
    for (const auto& weak : links_) {
      if (const LinkPtr link = weak.lock()) close(*link);
    }
    while (context.poll() != 0) {
    }
    if (failure_) return *failure_;
    return std::move(sockets_);
  }

 private:
  static std::size_t index(Rank rank) { return static_cast<std::size_t>(rank.value); }

  bool is_open(int rank) const { return sockets_[static_cast<std::size_t>(rank)].is_open(); }

  bool complete() const {
    for (int rank = 0; rank < options_.size; ++rank) {
      if (rank != options_.rank.value && !is_open(rank)) return false;
    }
    return true;
  }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < options_.size; ++rank) {
      if (rank != options_.rank.value && !is_open(rank)) ranks.push_back(rank);
    }
    return ranks;
  }

  std::string no_connection(const std::vector<int>& ranks, std::chrono::milliseconds within) const {
    return "no connection with " + list_ranks(ranks) + " in mesh '" + options_.name + "' within " +
           std::to_string(within.count()) + " ms";
  }

  Error late() const {
    const std::vector<int> ranks = missing();
    return make_error(ErrorKind::kDeadline, no_connection(ranks, options_.timeout),
                      Rank{ranks.front()});
  }

  /// There was time enough for connections.
  Error unreachable(const std::vector<int>& ranks, std::chrono::milliseconds within) const {
    const Rank first{ranks.front()};
    return make_error(ErrorKind::kUnsupported,
                      no_connection(ranks, within) +
                          ", though all ranks have come: " + address_of(first) +
                          " cannot be reached from here, or its process is gone "
                          "(GLOO_SOCKET_IFNAME chooses another interface)",
                      first);
  }

  std::string address_of(Rank rank) const {
    const MeshRecord& record = records_.ranks[index(rank)];
    return record.address + ":" + std::to_string(record.port);
  }

  void watch(const LinkPtr& link) {
    forget_ended();
    const auto same = [&](const std::weak_ptr<Link>& known) { return known.lock() == link; };
    if (std::none_of(links_.begin(), links_.end(), same)) links_.push_back(link);
  }

  void forget_ended() {
    std::erase_if(links_, [](const std::weak_ptr<Link>& link) { return link.expired(); });
  }

  static void close(Link& link) {
    asio::error_code ignored;
    link.socket.close(ignored);
    link.timer.cancel();
  }

  // Lower ranks: connect, say hello, read the answer.

  void connect(const LinkPtr& link) {
    watch(link);
    const MeshRecord& record = records_.ranks[index(link->peer)];
    asio::error_code bad;
    const auto address = asio::ip::make_address(record.address, bad);
    if (bad) {
      failure_ = make_error(ErrorKind::kUnsupported,
                            "rank " + std::to_string(link->peer.value) + " published '" +
                                record.address + "', which is no numeric address",
                            link->peer);
      return;
    }
    link->socket.async_connect({address, record.port}, [this, link](const asio::error_code& error) {
      if (done_) return;
      if (!may_go_on(*link, error)) return;
      if (error) return retry(link);
      link->ours = encode_hello(ours_);
      asio::async_write(link->socket, asio::buffer(link->ours),
                        [this, link](const asio::error_code& failed, std::size_t) {
                          if (done_) return;
                          if (failed) return retry(link);
                          read_answer(link);
                        });
    });
  }

  void read_answer(const LinkPtr& link) {
    asio::async_read(link->socket, asio::buffer(link->theirs),
                     [this, link](const asio::error_code& error, std::size_t) {
                       if (done_) return;
                       if (error) return retry(link);
                       const auto hello = decode_hello(link->theirs);
                       if (!hello || !is_member(*hello) || hello->rank != link->peer.value) {
                         return retry(link);
                       }
                       if (fits(*hello)) adopt(*link, link->peer);
                     });
  }

  /// The peer may still be starting, or a stranger may sit on a port that was its own.
  void retry(const LinkPtr& link) {
    asio::error_code ignored;
    link->socket.close(ignored);
    link->timer.expires_after(kRetry);
    link->timer.async_wait([this, link](const asio::error_code&) {
      if (!done_) connect(link);
    });
  }

  /// False once the peer has refused connections for so long that it is given up.
  bool may_go_on(Link& link, const asio::error_code& error) {
    if (error != asio::error::connection_refused || is_open(link.peer.value)) {
      link.refused.reset();
      return true;
    }
    const auto now = Clock::now();
    if (!link.refused) link.refused = now;
    if (now - *link.refused < kRefused) return true;
    failure_ = unreachable({link.peer.value}, kRefused);
    return false;
  }

  // Higher ranks: accept, read a hello, answer. One that does not come is tried now and then, with
  // a connection that says nothing.

  void probe_later(const LinkPtr& link) {
    watch(link);
    link->timer.expires_after(kProbe);
    link->timer.async_wait([this, link](const asio::error_code&) {
      if (!done_ && !is_open(link->peer.value)) probe(link);
    });
  }

  void probe(const LinkPtr& link) {
    const MeshRecord& record = records_.ranks[index(link->peer)];
    asio::error_code bad;
    const auto address = asio::ip::make_address(record.address, bad);
    if (bad) return;  // it knows better than this rank where it is
    link->socket.async_connect({address, record.port}, [this, link](const asio::error_code& error) {
      if (done_ || !may_go_on(*link, error)) return;
      asio::error_code unused;
      link->socket.close(unused);
      probe_later(link);
    });
  }

  void accept() {
    auto link = std::make_shared<Link>(acceptor_.get_executor(), Rank{});
    forget_ended();
    if (links_.size() >= kMaxStrangers + 2 * static_cast<std::size_t>(options_.size)) {
      return pause(link);
    }
    acceptor_.async_accept(link->socket, [this, link](const asio::error_code& error) {
      if (done_) return;
      if (error) return pause(link);  // out of handles, or the peer was gone again
      read_hello(link);
      accept();
    });
  }

  void pause(const LinkPtr& link) {
    watch(link);
    link->timer.expires_after(kRetry);
    link->timer.async_wait([this, link](const asio::error_code&) {
      if (!done_) accept();
    });
  }

  void read_hello(const LinkPtr& link) {
    watch(link);
    link->timer.expires_after(kSilence);
    link->timer.async_wait([this, link](const asio::error_code& error) {
      if (!error && !done_) close(*link);
    });
    asio::async_read(link->socket, asio::buffer(link->theirs),
                     [this, link](const asio::error_code& error, std::size_t) {
                       if (done_) return;
                       link->timer.cancel();
                       if (error) return close(*link);
                       consider(link);
                     });
  }

  void consider(const LinkPtr& link) {
    const auto hello = decode_hello(link->theirs);
    if (!hello || !is_member(*hello)) return close(*link);
    if (hello->rank <= options_.rank.value || hello->rank >= options_.size) return close(*link);
    link->peer.value = hello->rank;
    link->ours = encode_hello(ours_);
    asio::async_write(link->socket, asio::buffer(link->ours),
                      [this, link, theirs = *hello](const asio::error_code& error, std::size_t) {
                        if (done_) return;
                        if (error) return close(*link);
                        // The later connection counts: the peer gave up the earlier one.
                        if (fits(theirs)) adopt(*link, link->peer);
                      });
  }

  bool is_member(const Hello& hello) const { return equal_tokens(hello.token, ours_.token); }

  bool fits(const Hello& hello) {
    const Rank peer{hello.rank};
    if (hello.version == ours_.version && hello.size == ours_.size &&
        hello.settings_digest == ours_.settings_digest &&
        hello.host_digest == host_digest(records_.ranks[index(peer)])) {
      return true;
    }
    // Records that agreed were compared before, so this peer is not the one that published itself.
    const MeshRecord& own = records_.ranks[index(options_.rank)];
    failure_ = make_error(ErrorKind::kMismatch,
                          "rank " + std::to_string(hello.rank) +
                              " greets with another version, n or settings than it published; "
                              "here: \"" +
                              own.format + "\", \"" + own.settings + "\"",
                          peer);
    return false;
  }

  void adopt(Link& link, Rank peer) {
    asio::error_code error;
    link.socket.set_option(tcp::no_delay(true), error);
    // A program that this rank starts must not keep the connection open when the rank dies.
    ::fcntl(link.socket.native_handle(), F_SETFD, FD_CLOEXEC);
    if (!error) link.socket.non_blocking(true, error);
    if (error) return close(link);
    sockets_[index(peer)] = std::move(link.socket);
  }

  const NativeMeshOptions& options_;
  const MeshRecords& records_;
  MeshAcceptor& acceptor_;
  Rendezvous& rendezvous_;
  Hello ours_;
  std::vector<MeshSocket> sockets_;
  std::vector<std::weak_ptr<Link>> links_;
  std::optional<Error> failure_;
  bool done_ = false;
};

}  // namespace

Status listen_on(const std::string& address, MeshAcceptor& acceptor) {
  asio::error_code error;
  const auto numeric = asio::ip::make_address(address, error);
  if (error) {
    return make_error(ErrorKind::kUnsupported, "'" + address + "' is no numeric address");
  }
  const tcp::endpoint endpoint(numeric, 0);
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (error) {
    return make_error(ErrorKind::kUnsupported,
                      "cannot listen on " + address + ": " + error.message());
  }
  return {};
}

Result<std::vector<MeshSocket>> connect_mesh(const NativeMeshOptions& options,
                                             const MeshRecords& records, MeshAcceptor& acceptor,
                                             Rendezvous& rendezvous, Clock::time_point deadline) {
  Connector connector(options, records, acceptor, rendezvous);
  return connector.run(deadline);
}

}  // namespace zensync::driver
