// Plain sockets that act as strangers, and a Rendezvous that tells when a rank listens.
// Place: tests of the native mesh. A Stranger owns its socket. POSIX only.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <functional>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "zensync/driver/rendezvous.hpp"

namespace zensync::test {

class Stranger {
 public:
  /// receive_bytes: how much the system takes for it without being asked, 0 for the usual.
  explicit Stranger(int port, int receive_bytes = 0) : handle_(::socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_bytes != 0) {
      ::setsockopt(handle_, SOL_SOCKET, SO_RCVBUF, &receive_bytes, sizeof receive_bytes);
    }
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int at_once = 1;
    ::setsockopt(handle_, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
    connected_ =
        ::connect(handle_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }
  ~Stranger() {
    if (handle_ >= 0) ::close(handle_);
  }
  Stranger(Stranger&& other) noexcept
      : handle_(std::exchange(other.handle_, -1)), connected_(other.connected_) {}
  Stranger& operator=(Stranger&&) = delete;

  bool connected() const { return connected_; }
  void say(std::span<const std::byte> bytes) {
    (void)!::send(handle_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  /// `size` bytes, or those that came before a pause of `wait_ms` or the end.
  std::vector<std::byte> hear(std::size_t size, int wait_ms) {
    pause_after(wait_ms);
    std::vector<std::byte> bytes(size);
    std::size_t at = 0;
    while (at < size) {
      const auto count = ::recv(handle_, bytes.data() + at, size - at, 0);
      if (count <= 0) break;
      at += static_cast<std::size_t>(count);
    }
    bytes.resize(at);
    return bytes;
  }
  /// The port that its peer sees.
  int own_port() const {
    sockaddr_in address{};
    socklen_t length = sizeof address;
    ::getsockname(handle_, reinterpret_cast<sockaddr*>(&address), &length);
    return ntohs(address.sin_port);
  }
  /// Bytes that came within `wait_ms` before the end of the connection; −1: it is still open.
  int listen_until_closed(int wait_ms) {
    pause_after(wait_ms);
    char block[4096];
    int total = 0;
    for (;;) {
      const auto count = ::recv(handle_, block, sizeof block, 0);
      if (count == 0 || (count < 0 && errno == ECONNRESET)) return total;
      if (count < 0) return -1;
      total += static_cast<int>(count);
    }
  }

 private:
  void pause_after(int wait_ms) {
    const timeval limit{wait_ms / 1000, (wait_ms % 1000) * 1000};
    ::setsockopt(handle_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }

  int handle_;
  bool connected_ = false;
};

/// Listens on a port of 127.0.0.1 and never accepts: the system takes connections, nobody answers.
class SilentListener {
 public:
  SilentListener() : handle_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    (void)!::bind(handle_, reinterpret_cast<const sockaddr*>(&address), length);
    (void)!::listen(handle_, 8);
    ::getsockname(handle_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
  }
  ~SilentListener() { ::close(handle_); }
  SilentListener(const SilentListener&) = delete;
  SilentListener& operator=(const SilentListener&) = delete;
  int port() const { return port_; }

 private:
  int handle_;
  int port_ = 0;
};

/// Passes everything on, and calls `on_set(key, value)` after each `set`.
class WatchedRendezvous final : public Rendezvous {
 public:
  using Watcher = std::function<void(const std::string&, const std::string&)>;
  WatchedRendezvous(Rendezvous& inner, Watcher on_set)
      : inner_(inner), on_set_(std::move(on_set)) {}
  Status set(const std::string& key, const std::string& value) override {
    Status status = inner_.set(key, value);
    on_set_(key, value);
    return status;
  }
  Result<std::string> wait(const std::string& key, std::chrono::milliseconds timeout) override {
    return inner_.wait(key, timeout);
  }
  Result<std::string> get(const std::string& key) override { return inner_.get(key); }
  Result<std::string> compare_set(const std::string& key, const std::string& expected,
                                  const std::string& desired) override {
    return inner_.compare_set(key, expected, desired);
  }
  Status check() override { return check_ ? check_() : Status(); }
  void on_check(std::function<Status()> check) { check_ = std::move(check); }

 private:
  Rendezvous& inner_;
  Watcher on_set_;
  std::function<Status()> check_;
};

/// The port in a published record: its third line.
inline int port_of(const std::string& record) {
  std::istringstream lines(record);
  std::string line;
  for (int i = 0; i < 3; ++i) std::getline(lines, line);
  return std::stoi(line);
}

}  // namespace zensync::test
