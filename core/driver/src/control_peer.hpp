// One control connection: small frames in both directions, never waiting.
// Place: driver, level 4, private to control.cpp. Owns its socket and what could not be written at
// once. Runs on the thread that runs the io_context, which must end before this object does. What
// comes in is told to ControlEvents; bytes that are no frame end the connection like a reset.
#pragma once

#include <array>
#include <asio/io_context.hpp>
#include <span>
#include <string>
#include <vector>

#include "mesh_peer.hpp"

namespace zensync::driver {

class ControlEvents {
 public:
  virtual ~ControlEvents() = default;
  virtual void on_beat(Rank from, const Progress& progress) = 0;
  virtual void on_abort(Rank from, Error why) = 0;
  virtual void on_goodbye(Rank from) = 0;
  /// Without a goodbye.
  virtual void on_lost(Rank from, const std::string& how) = 0;
};

class ControlPeer {
 public:
  ControlPeer(Rank rank, MeshSocket socket, ControlEvents& events)
      : rank_(rank), socket_(std::move(socket)), events_(events) {}

  Rank rank() const { return rank_; }
  void read();
  /// Queued behind what is not written yet; a beat is left out then: the next one says it all.
  void send(std::span<const std::byte> frame, bool is_beat);
  bool has_unsent() const { return !out_.empty(); }
  /// Drops what has come in, and says that nothing more will be sent.
  void finish();
  void close_handle_in_child() noexcept;

 private:
  void parse();
  /// False when the frame ends the connection.
  bool take(std::uint16_t kind, std::span<const std::byte> payload);
  void write();
  void end(const std::string& how);

  const Rank rank_;
  MeshSocket socket_;
  ControlEvents& events_;
  bool ended_ = false;
  bool writing_ = false;
  std::array<std::byte, kPrefixBytes + kMaxAbortBytes> in_{};
  std::size_t in_bytes_ = 0;
  std::vector<std::byte> out_;
};

}  // namespace zensync::driver
