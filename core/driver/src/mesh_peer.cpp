// The sending half of one connection of the native mesh, and how it ends. The receiving half is in
// mesh_read.cpp. Place: driver, level 4, private. Memory of queued messages is the caller's until
// they are written or `detach` is called. Runs on the thread that runs the io_context. A send is
// tried at once, prefixes and payloads gathered into one call; only what the system does not take
// waits for room. A failing write ends the connection, but first what the peer may have said is
// looked for: a peer that aborts and closes makes our writes fail before its reason has been read.
#include "mesh_peer.hpp"

#include <unistd.h>

#include <algorithm>
#include <asio/error.hpp>
#include <new>

#if defined(__linux__)
#include <linux/sockios.h>
#include <sys/ioctl.h>
#endif

#include "common.hpp"

namespace zensync::driver {
namespace {

constexpr std::size_t kGatherMessages = 8;
constexpr int kDrainReads = 256;  // a peer that sends faster than we read must not hold us

template <class T>
struct HandlerAllocator {
  using value_type = T;
  explicit HandlerAllocator(HandlerMemory* memory) : slot(memory) {}
  template <class U>
  HandlerAllocator(const HandlerAllocator<U>& other)  // NOLINT(google-explicit-constructor)
      : slot(other.slot) {}

  T* allocate(std::size_t count) {
    if (!slot->used && count * sizeof(T) <= slot->block.size()) {
      slot->used = true;
      return reinterpret_cast<T*>(slot->block.data());
    }
    return static_cast<T*>(::operator new(count * sizeof(T)));
  }
  void deallocate(T* memory, std::size_t) {
    if (reinterpret_cast<std::byte*>(memory) == slot->block.data()) {
      slot->used = false;
    } else {
      ::operator delete(memory);
    }
  }
  bool operator==(const HandlerAllocator& other) const { return slot == other.slot; }

  HandlerMemory* slot;
};

/// A completion handler that keeps its operation in HandlerMemory.
template <class F>
struct PeerHandler {
  using allocator_type = HandlerAllocator<void>;
  F function;
  HandlerMemory* memory;
  allocator_type get_allocator() const noexcept { return allocator_type(memory); }
  void operator()(const asio::error_code& error) { function(error); }
};

template <class F>
PeerHandler<F> in_memory(HandlerMemory& memory, F function) {
  return {function, &memory};
}

}  // namespace

/// A range of buffers on the stack, as Asio wants it.
class MeshPeer::Gather {
 public:
  void add(const std::byte* data, std::size_t size_bytes) {
    if (size_bytes == 0) return;
    parts_[count_++] = asio::const_buffer(data, size_bytes);
    total_bytes_ += size_bytes;
  }
  const asio::const_buffer* begin() const { return parts_.data(); }
  const asio::const_buffer* end() const { return parts_.data() + count_; }
  std::size_t total_bytes() const { return total_bytes_; }

 private:
  std::array<asio::const_buffer, 2 * kGatherMessages> parts_;
  std::size_t count_ = 0;
  std::size_t total_bytes_ = 0;
};

void MeshShared::fail(Error error) {
  if (!failure) failure = std::move(error);
}

void MeshShared::receive_abort(Error error, Rank from) {
  // A lost peer is often only the echo of what the abort explains.
  if (failure && (abort_received || failure->kind != ErrorKind::kPeerLost)) return;
  failure = reported_by(from, std::move(error));
  abort_received = true;
}

MeshPeer::MeshPeer(Rank rank, MeshSocket socket, MeshShared& shared,
                   std::span<HandlerMemory, 2> memory)
    : rank_(rank),
      socket_(std::move(socket)),
      shared_(shared),
      memory_(memory),
      staging_(new std::byte[kStagingBytes]) {}

MeshPeer::~MeshPeer() { close(); }

void MeshPeer::post_recv(const Recv& recv) {
  recvs_.push_back(&recv);
  ++shared_.open_recvs;
}

void MeshPeer::post_send(std::span<const std::byte> message) {
  if (ended_) {
    shared_.fail(lost_error(shared_.self, rank_, end_text_));
    return;
  }
  out_.push_back({encode_prefix(FrameKind::kData, message.size()), message.data(), message.size(),
                  shared_.sequence});
  ++shared_.new_sends;
  ++shared_.count.sent_messages;
  shared_.count.sent_bytes += kPrefixBytes + message.size();
}

bool MeshPeer::has_old_sends() const {
  return has_sends() && out_[out_head_].sequence != shared_.sequence;
}

void MeshPeer::write() {
  if (write_armed_ || ended_) return;
  if (farewell_) {
    write_farewell();
  } else {
    write_messages();
  }
}

void MeshPeer::write_messages() {
  while (has_sends()) {
    Gather gather;
    std::size_t skip_bytes = head_written_bytes_;
    const std::size_t last = std::min(out_.size(), out_head_ + kGatherMessages);
    for (std::size_t i = out_head_; i < last; ++i) {
      const OutMessage& message = out_[i];
      const std::size_t of_prefix = std::min(skip_bytes, kPrefixBytes);
      const std::size_t of_data = skip_bytes - of_prefix;
      gather.add(message.prefix.data() + of_prefix, kPrefixBytes - of_prefix);
      if (of_data < message.size_bytes) {
        gather.add(message.data + of_data, message.size_bytes - of_data);
      }
      skip_bytes = 0;
    }
    asio::error_code error;
    const std::size_t written_bytes = socket_.send(gather, 0, error);
    if (error == asio::error::interrupted) continue;
    if (error && error != asio::error::would_block && error != asio::error::try_again) {
      connection_ended(error.message());
      return;
    }
    if (!error) advance(written_bytes);
    if (error || written_bytes < gather.total_bytes()) {
      arm_write();
      return;
    }
  }
}

void MeshPeer::advance(std::size_t written_bytes) {
  head_written_bytes_ += written_bytes;
  while (has_sends()) {
    const OutMessage& head = out_[out_head_];
    const std::size_t frame_bytes = kPrefixBytes + head.size_bytes;
    if (head_written_bytes_ < frame_bytes) break;
    head_written_bytes_ -= frame_bytes;
    --(head.sequence == shared_.sequence ? shared_.new_sends : shared_.old_sends);
    ++out_head_;
  }
  if (!has_sends()) {
    out_.clear();
    out_head_ = 0;
  } else if (out_head_ >= 64 && 2 * out_head_ >= out_.size()) {
    out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(out_head_));
    out_head_ = 0;
  }
}

void MeshPeer::detach() {
  if (head_written_bytes_ != 0) {
    const OutMessage& head = out_[out_head_];
    const std::size_t of_prefix = std::min(head_written_bytes_, kPrefixBytes);
    const std::size_t of_data = head_written_bytes_ - of_prefix;
    last_bytes_.reserve(kPrefixBytes + head.size_bytes + kPrefixBytes + kMaxAbortBytes);
    last_bytes_.assign(head.prefix.begin() + static_cast<std::ptrdiff_t>(of_prefix),
                       head.prefix.end());
    last_bytes_.insert(last_bytes_.end(), head.data + of_data, head.data + head.size_bytes);
    head_written_bytes_ = 0;
  }
  out_.clear();
  out_head_ = 0;
  recvs_.clear();
  recv_head_ = 0;
  in_message_ = false;
  farewell_ = true;
}

void MeshPeer::begin_farewell(std::span<const std::byte> frame) {
  if (!farewell_) detach();
  last_bytes_.insert(last_bytes_.end(), frame.begin(), frame.end());
  write();
  if (!read_armed_) arm_read();
}

void MeshPeer::write_farewell() {
  while (last_written_bytes_ < last_bytes_.size()) {
    asio::error_code error;
    const auto rest = asio::buffer(last_bytes_) + last_written_bytes_;
    const std::size_t written_bytes = socket_.send(rest, 0, error);
    if (error == asio::error::interrupted) continue;
    if (error && error != asio::error::would_block && error != asio::error::try_again) {
      ended_ = true;
      return;
    }
    if (!error) last_written_bytes_ += written_bytes;
    if (error || last_written_bytes_ < last_bytes_.size()) {
      arm_write();
      return;
    }
  }
}

void MeshPeer::send_goodbye() {
  if (has_sends() || ended_) return;
  const PrefixBytes prefix = encode_prefix(FrameKind::kGoodbye, 0);
  asio::error_code ignored;
  socket_.send(asio::buffer(prefix), 0, ignored);
}

void MeshPeer::shutdown_send() {
  asio::error_code ignored;
  socket_.shutdown(asio::socket_base::shutdown_send, ignored);
}

bool MeshPeer::drain() {
  if (ended_) return true;
  for (int reads = 0; reads < kDrainReads; ++reads) {
    asio::error_code error;
    socket_.receive(asio::buffer(staging_.get(), kStagingBytes), 0, error);
    if (!error || error == asio::error::interrupted) continue;
    if (error == asio::error::would_block || error == asio::error::try_again) break;
    if (error == asio::error::eof) break;
    return true;  // reset: nothing can arrive any more
  }
#if defined(__linux__)
  int unsent_bytes = 0;
  if (::ioctl(socket_.native_handle(), SIOCOUTQ, &unsent_bytes) != 0) return true;
  if (unsent_bytes == 0) return true;
  asio::error_code reset;  // a connection that was reset keeps its count for ever
  socket_.remote_endpoint(reset);
  return static_cast<bool>(reset);
#else
  return true;
#endif
}

void MeshPeer::close() {
  asio::error_code ignored;
  socket_.close(ignored);
  ended_ = true;
}

void MeshPeer::close_handle_in_child() noexcept {
  if (socket_.is_open()) ::close(socket_.native_handle());
}

void MeshPeer::arm_read() {
  if (read_armed_ || ended_) return;
  read_armed_ = true;
  socket_.async_wait(asio::socket_base::wait_read,
                     in_memory(memory_[0], [this](const asio::error_code& error) {
                       read_armed_ = false;
                       if (error != asio::error::operation_aborted) read();
                     }));
}

void MeshPeer::arm_write() {
  if (write_armed_ || ended_) return;
  write_armed_ = true;
  socket_.async_wait(asio::socket_base::wait_write,
                     in_memory(memory_[1], [this](const asio::error_code& error) {
                       write_armed_ = false;
                       if (error != asio::error::operation_aborted) write();
                     }));
}

}  // namespace zensync::driver
