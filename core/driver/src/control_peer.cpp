// Frames of one control connection; see control_peer.hpp. Place: driver, level 4, private.
// Reads with one pending operation, writes at once and waits for room only when there is none: a
// peer that does not read costs memory for aborts alone, beats are left out.
#include "control_peer.hpp"

#include <unistd.h>

#include <asio/error.hpp>
#include <cstring>

namespace zensync::driver {
namespace {

constexpr int kDrainReads = 64;

bool is_later(const asio::error_code& error) {
  return error == asio::error::would_block || error == asio::error::try_again ||
         error == asio::error::interrupted;
}

}  // namespace

void ControlPeer::read() {
  if (ended_) return;
  const auto room = asio::buffer(in_.data() + in_bytes_, in_.size() - in_bytes_);
  socket_.async_read_some(room, [this](const asio::error_code& error, std::size_t count) {
    if (ended_ || error == asio::error::operation_aborted) return;
    if (error) {
      end(error == asio::error::eof ? "it closed the connection" : error.message());
      return;
    }
    in_bytes_ += count;
    parse();
    read();
  });
}

void ControlPeer::parse() {
  std::size_t at = 0;
  while (!ended_ && in_bytes_ - at >= kPrefixBytes) {
    const FramePrefix prefix = decode_prefix(in_.data() + at);
    if (prefix.length_bytes > kMaxAbortBytes) return end("it sent something else than a frame");
    const std::size_t frame_bytes = kPrefixBytes + static_cast<std::size_t>(prefix.length_bytes);
    if (in_bytes_ - at < frame_bytes) break;
    const std::byte* payload = in_.data() + at + kPrefixBytes;
    if (!take(prefix.kind, {payload, frame_bytes - kPrefixBytes})) return;
    at += frame_bytes;
  }
  std::memmove(in_.data(), in_.data() + at, in_bytes_ - at);
  in_bytes_ -= at;
}

bool ControlPeer::take(std::uint16_t kind, std::span<const std::byte> payload) {
  if (kind == static_cast<std::uint16_t>(FrameKind::kBeat)) {
    if (const auto progress = decode_beat(payload)) {
      events_.on_beat(rank_, *progress);
      return true;
    }
  } else if (kind == static_cast<std::uint16_t>(FrameKind::kAbort)) {
    if (auto why = decode_abort(payload)) {
      events_.on_abort(rank_, std::move(*why));
      return true;
    }
  } else if (kind == static_cast<std::uint16_t>(FrameKind::kGoodbye) && payload.empty()) {
    ended_ = true;
    events_.on_goodbye(rank_);
    return false;
  }
  end("it sent something else than a frame");
  return false;
}

void ControlPeer::send(std::span<const std::byte> frame, bool is_beat) {
  if (ended_ || (is_beat && has_unsent())) return;
  out_.insert(out_.end(), frame.begin(), frame.end());
  if (!writing_) write();
}

void ControlPeer::write() {
  while (!out_.empty() && !ended_) {
    asio::error_code error;
    const std::size_t count = socket_.send(asio::buffer(out_), 0, error);
    if (!error) {
      out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(count));
      continue;
    }
    if (!is_later(error)) {
      out_.clear();  // the reading side says how it ended
      return;
    }
    writing_ = true;
    socket_.async_wait(asio::socket_base::wait_write, [this](const asio::error_code& failed) {
      writing_ = false;
      if (!failed) write();
    });
    return;
  }
}

void ControlPeer::end(const std::string& how) {
  if (ended_) return;
  ended_ = true;
  out_.clear();
  events_.on_lost(rank_, how);
}

void ControlPeer::finish() {
  asio::error_code error;
  for (int reads = 0; reads < kDrainReads && !error; ++reads) {
    socket_.receive(asio::buffer(in_), 0, error);
  }
  asio::error_code ignored;
  socket_.shutdown(asio::socket_base::shutdown_send, ignored);
  socket_.close(ignored);
}

void ControlPeer::close_handle_in_child() noexcept {
  if (socket_.is_open()) ::close(socket_.native_handle());
}

}  // namespace zensync::driver
