// The receiving half of one connection of the native mesh; the rest of MeshPeer is in
// mesh_peer.cpp. Place: driver, level 4, private. Bytes land in staging first; once a message has
// begun, one call fills the rest of its Buffer and staging behind it. A prefix is checked against
// Recv::capacity_bytes before anything is stored. Runs on the thread that runs the io_context.
// While staging has room the connection is watched even if nothing is awaited from it, so that an
// abort or the end of a peer is seen by ranks that wait for somebody else.
#include <algorithm>
#include <asio/error.hpp>
#include <cstring>

#include "common.hpp"
#include "mesh_peer.hpp"

namespace zensync::driver {

void MeshPeer::read() {
  while (!ended_) {
    if (farewell_) {
      drop_input();
      return;
    }
    std::array<asio::mutable_buffer, 2> parts;
    stage_compact();
    if (in_message_) {
      Buffer& into = *recvs_[recv_head_]->into;
      parts[0] = asio::buffer(into.data() + filled_bytes_, into.size() - filled_bytes_);
    }
    parts[1] = asio::buffer(staging_.get() + staged_end_, kStagingBytes - staged_end_);
    const std::size_t room_bytes = parts[0].size() + parts[1].size();
    if (room_bytes == 0) return;  // left to TCP until a Recv makes room
    asio::error_code error;
    const std::size_t count = in_message_ ? socket_.receive(parts, 0, error)
                                          : socket_.receive(asio::buffer(parts[1]), 0, error);
    if (error == asio::error::interrupted) continue;
    if (error == asio::error::would_block || error == asio::error::try_again) break;
    if (error) {
      connection_ended(error == asio::error::eof ? "it closed the connection" : error.message());
      return;
    }
    const std::size_t direct_bytes = std::min(count, parts[0].size());
    filled_bytes_ += direct_bytes;
    staged_end_ += count - direct_bytes;
    parse();
    if (shared_.failure) break;
    if (count < room_bytes) break;  // there was no more
  }
  arm_read();
}

void MeshPeer::drop_input() {
  asio::error_code error;
  socket_.receive(asio::buffer(staging_.get(), kStagingBytes), 0, error);
  if (!error || error == asio::error::would_block || error == asio::error::try_again ||
      error == asio::error::interrupted) {
    arm_read();
  }
}

void MeshPeer::stage_compact() {
  if (staged_begin_ == 0) return;
  const std::size_t count = staged_bytes();
  if (count != 0) std::memmove(staging_.get(), staging_.get() + staged_begin_, count);
  staged_begin_ = 0;
  staged_end_ = count;
}

void MeshPeer::read_staged() {
  parse();
  if (shared_.failure || !has_open_recvs()) return;
  if (ended_) {
    shared_.fail(lost_error(shared_.self, rank_, end_text_));
  } else if (!read_armed_) {
    read();
  }
}

void MeshPeer::parse() {
  for (;;) {
    if (in_message_ && !fill_message()) return;
    if (staged_bytes() < kPrefixBytes) return;
    const FramePrefix prefix = decode_prefix(staging_.get() + staged_begin_);
    if (prefix.kind != static_cast<std::uint16_t>(FrameKind::kData)) {
      if (!take_control(prefix)) return;
    } else if (!has_open_recvs()) {
      look_ahead();
      return;
    } else if (!begin_message(prefix.length_bytes)) {
      return;
    }
  }
}

bool MeshPeer::begin_message(std::uint64_t length_bytes) {
  const Recv& recv = *recvs_[recv_head_];
  if (length_bytes > recv.capacity_bytes) {
    shared_.fail(too_long_error(shared_.self, rank_, length_bytes, recv.capacity_bytes));
    return false;
  }
  recv.into->resize_discard(static_cast<std::size_t>(length_bytes));
  staged_begin_ += kPrefixBytes;
  in_message_ = true;
  filled_bytes_ = 0;
  return true;
}

bool MeshPeer::fill_message() {
  Buffer& into = *recvs_[recv_head_]->into;
  const std::size_t count = std::min(into.size() - filled_bytes_, staged_bytes());
  if (count != 0) {
    std::memcpy(into.data() + filled_bytes_, staging_.get() + staged_begin_, count);
    filled_bytes_ += count;
    staged_begin_ += count;
  }
  if (filled_bytes_ < into.size()) return false;
  in_message_ = false;
  --shared_.open_recvs;
  ++shared_.count.received_messages;
  shared_.count.received_bytes += kPrefixBytes + into.size();
  if (++recv_head_ == recvs_.size()) {
    recvs_.clear();
    recv_head_ = 0;
  }
  return true;
}

/// True when the frame is done with and another may follow.
bool MeshPeer::take_control(const FramePrefix& prefix) {
  if (prefix.kind == static_cast<std::uint16_t>(FrameKind::kGoodbye) && prefix.length_bytes == 0) {
    goodbye_ = true;
    staged_begin_ += kPrefixBytes;
    return true;
  }
  std::optional<Error> why;
  if (prefix.kind == static_cast<std::uint16_t>(FrameKind::kAbort) &&
      prefix.length_bytes <= kMaxAbortBytes) {
    const auto length_bytes = static_cast<std::size_t>(prefix.length_bytes);
    if (staged_bytes() < kPrefixBytes + length_bytes) return false;
    why = decode_abort({staging_.get() + staged_begin_ + kPrefixBytes, length_bytes});
  }
  if (why) {
    shared_.receive_abort(std::move(*why), rank_);
  } else {
    shared_.fail(Error{ErrorKind::kCorruptMessage,
                       "rank " + std::to_string(rank_.value) + " sent a frame of no known kind (" +
                           std::to_string(prefix.kind) + ")",
                       shared_.self,
                       rank_,
                       {}});
  }
  return false;
}

/// Messages that no Recv awaits yet stay in staging; an abort behind them counts at once.
void MeshPeer::look_ahead() {
  std::size_t at = staged_begin_;
  while (staged_end_ - at >= kPrefixBytes) {
    const FramePrefix prefix = decode_prefix(staging_.get() + at);
    const std::size_t rest_bytes = staged_end_ - at - kPrefixBytes;
    if (prefix.length_bytes > rest_bytes) return;
    const auto length_bytes = static_cast<std::size_t>(prefix.length_bytes);
    if (prefix.kind == static_cast<std::uint16_t>(FrameKind::kAbort)) {
      auto why = decode_abort({staging_.get() + at + kPrefixBytes, length_bytes});
      if (why) shared_.receive_abort(std::move(*why), rank_);
      return;
    }
    if (prefix.kind == static_cast<std::uint16_t>(FrameKind::kGoodbye)) goodbye_ = true;
    at += kPrefixBytes + length_bytes;
  }
}

/// After the end of a connection: is there an abort in what the peer sent last? Reads all of it.
std::optional<Error> MeshPeer::seek_abort() {
  std::uint64_t skip_bytes = 0;
  if (in_message_) skip_bytes = recvs_[recv_head_]->into->size() - filled_bytes_;
  AbortFinder finder(skip_bytes);
  bool done = finder.feed({staging_.get() + staged_begin_, staged_bytes()});
  std::vector<std::byte> block(kStagingBytes);
  while (!done) {
    asio::error_code error;
    const std::size_t count = socket_.receive(asio::buffer(block), 0, error);
    if (error == asio::error::interrupted) continue;
    if (error) break;
    done = finder.feed({block.data(), count});
  }
  return finder.found();
}

void MeshPeer::connection_ended(const std::string& how) {
  if (ended_) return;
  std::optional<Error> why = seek_abort();
  ended_ = true;
  end_text_ = how;
  if (why) {
    shared_.receive_abort(std::move(*why), rank_);
  } else if (!goodbye_ || has_open_recvs() || has_sends()) {
    shared_.fail(lost_error(shared_.self, rank_, how));
  }
}

}  // namespace zensync::driver
