// One connection of the native mesh: framed send and receive as two state machines over a socket.
// Place: driver, level 4, private to the native mesh; `native_mesh.cpp` drives it,
// `mesh_connect.cpp` makes the socket. A MeshPeer owns its socket and 64 KiB of staging; messages
// and Buffers are the caller's. One thread at a time, the one that runs the io_context. It reports
// to MeshShared: what is still open, and the first failure (a lost peer, a message that is too
// long, an abort that came). Bytes are read ahead of their Recv only as far as staging goes; the
// rest is TCP's back-pressure.
#pragma once

#include <array>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "wire.hpp"
#include "zensync/driver/driver.hpp"

namespace zensync::driver {

/// Names the executor's type, which spares Asio a type-erased one per operation.
using MeshSocket = asio::basic_stream_socket<asio::ip::tcp, asio::io_context::executor_type>;

/// Memory for the one pending wait of a kind, so that a warm exchange allocates nothing. It must
/// outlive the io_context, which gives blocks of abandoned waits back when it ends.
struct HandlerMemory {
  alignas(std::max_align_t) std::array<std::byte, 256> block;
  bool used = false;
};

/// Room for bytes that nobody awaits yet; also one read of a small message.
inline constexpr std::size_t kStagingBytes = 64 * 1024;

/// What the peers of one mesh and its driver know together.
struct MeshShared {
  Rank self;
  std::uint64_t sequence = 0;  ///< number of the current exchange
  std::size_t open_recvs = 0;  ///< Recvs of this exchange still to be filled
  std::size_t old_sends = 0;   ///< messages of earlier exchanges not yet written
  std::size_t new_sends = 0;   ///< messages of this exchange not yet written
  std::optional<Error> failure;
  bool abort_received = false;  ///< `failure` is what a peer told us
  WireCount count;

  void fail(Error error);
  void receive_abort(Error error, Rank from);
};

class MeshPeer {
 public:
  MeshPeer(Rank rank, MeshSocket socket, MeshShared& shared, std::span<HandlerMemory, 2> memory);
  ~MeshPeer();
  MeshPeer(const MeshPeer&) = delete;
  MeshPeer& operator=(const MeshPeer&) = delete;

  Rank rank() const { return rank_; }
  /// Watches the connection from now on.
  void start() { arm_read(); }

  /// Both only note; `write` and `read_staged` go to work. `recv` must live until the exchange
  /// ends.
  void post_recv(const Recv& recv);
  void post_send(std::span<const std::byte> message);
  /// Hands to the system what it takes at once and waits for room for the rest.
  void write();
  /// Fills Recvs with bytes that came earlier.
  void read_staged();

  bool has_open_recvs() const { return recv_head_ < recvs_.size(); }
  bool has_old_sends() const;
  bool has_sends() const { return out_head_ < out_.size(); }
  bool ended() const { return ended_; }

  /// Ends all use of the callers' memory: copies the rest of a message that is half written (the
  /// frames behind it need it) and drops the others and all Recvs.
  void detach();
  /// From here on what comes in is dropped; `frame` goes out behind what must go before it.
  void begin_farewell(std::span<const std::byte> frame);
  bool farewell_written() const { return ended_ || last_written_bytes_ == last_bytes_.size(); }
  /// The word that makes the end of this connection no fault; left out if messages are still
  /// queued.
  void send_goodbye();
  /// Says that nothing more will be sent.
  void shutdown_send();
  /// Drops what has come in; true when the peer has acknowledged all that was sent, or is gone.
  bool drain();
  void close();
  void close_handle_in_child() noexcept;

 private:
  struct OutMessage {
    PrefixBytes prefix;
    const std::byte* data;
    std::size_t size_bytes;
    std::uint64_t sequence;
  };
  class Gather;

  // mesh_read.cpp
  void read();
  void drop_input();
  void parse();
  bool begin_message(std::uint64_t length_bytes);
  bool fill_message();
  bool take_control(const FramePrefix& prefix);
  void look_ahead();
  std::optional<Error> seek_abort();
  void connection_ended(const std::string& how);
  void stage_compact();
  std::size_t staged_bytes() const { return staged_end_ - staged_begin_; }

  // mesh_peer.cpp
  void write_messages();
  void write_farewell();
  void advance(std::size_t written_bytes);
  void arm_read();
  void arm_write();

  const Rank rank_;
  MeshSocket socket_;
  MeshShared& shared_;
  std::span<HandlerMemory, 2> memory_;
  bool read_armed_ = false;
  bool write_armed_ = false;
  bool goodbye_ = false;  // the peer said that its end is no fault
  bool ended_ = false;
  bool farewell_ = false;  // nothing that comes in matters any more
  std::string end_text_;

  std::vector<const Recv*> recvs_;
  std::size_t recv_head_ = 0;
  bool in_message_ = false;  // the message of recvs_[recv_head_] has begun
  std::size_t filled_bytes_ = 0;
  std::unique_ptr<std::byte[]> staging_;
  std::size_t staged_begin_ = 0;
  std::size_t staged_end_ = 0;

  std::vector<OutMessage> out_;
  std::size_t out_head_ = 0;
  std::size_t head_written_bytes_ = 0;  // of out_[out_head_], prefix included
  std::vector<std::byte> last_bytes_;   // owned: rest of a message, then an abort
  std::size_t last_written_bytes_ = 0;
};

}  // namespace zensync::driver
