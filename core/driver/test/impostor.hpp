// Plain sockets that know the token and take the place of a rank: they say what a test wants, and
// vanish without a word as a killed process would. Place: tests of the native mesh and the control
// connections. An Impostor is always the last rank of a mesh, which connects to all others and
// accepts nobody; it owns its sockets, and is used by one thread.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "mesh_records.hpp"
#include "strangers.hpp"
#include "wire.hpp"

namespace zensync::test {

inline std::vector<std::byte> frame_of(driver::FrameKind kind, std::uint64_t length_bytes,
                                       const std::vector<std::byte>& payload) {
  const auto prefix = driver::encode_prefix(kind, length_bytes);
  std::vector<std::byte> frame(prefix.size() + payload.size());
  std::copy(payload.begin(), payload.end(), std::copy(prefix.begin(), prefix.end(), frame.data()));
  return frame;
}

/// What `rank` of `size` would say to a mesh whose rank 0 published `text` and `token`.
inline driver::Hello right_hello(const std::string& text, const std::string& token, int rank,
                                 int size) {
  std::istringstream lines(text);
  driver::MeshRecord record;
  std::string skipped;
  std::getline(lines, record.format);
  std::getline(lines, skipped);
  std::getline(lines, skipped);
  std::getline(lines, record.host_id);
  std::getline(lines, record.settings);
  driver::Hello hello;
  hello.size = size;
  hello.rank = rank;
  for (std::size_t i = 0; i < driver::kTokenBytes; ++i) {
    hello.token[i] = static_cast<std::byte>(std::stoi(token.substr(2 * i, 2), nullptr, 16));
  }
  hello.settings_digest = driver::settings_digest(record);
  hello.host_digest = driver::host_digest(record);
  return hello;
}

class Impostor {
 public:
  /// Joins mesh `name` as its last rank; empty when it could not. receive_bytes: how much its
  /// system takes without being asked, 0 for the usual.
  Impostor(Rendezvous& rendezvous, const std::string& name, int size, int receive_bytes = 0) {
    using namespace std::chrono_literals;  // NOLINT(google-build-using-namespace): tests only
    const std::string prefix = name + "/rank/";
    const std::string token = rendezvous.wait(name + "/token", 5s).value();
    const std::string first = rendezvous.wait(prefix + "0", 5s).value();
    (void)rendezvous.set(prefix + std::to_string(size - 1), first).ok();
    const auto hello = driver::encode_hello(right_hello(first, token, size - 1, size));
    for (int rank = 0; rank < size - 1; ++rank) {
      const std::string record = rendezvous.wait(prefix + std::to_string(rank), 5s).value();
      sockets_.emplace_back(port_of(record), receive_bytes);
      sockets_.back().say(hello);
    }
    for (auto& socket : sockets_) (void)socket.hear(driver::kHelloBytes, 5000);
  }

  Stranger& to(int rank) { return sockets_[static_cast<std::size_t>(rank)]; }
  void say_to_all(std::span<const std::byte> bytes) {
    for (auto& socket : sockets_) socket.say(bytes);
  }
  void beat(const driver::Progress& progress = {}) { say_to_all(driver::encode_beat(progress)); }
  void vanish() { sockets_.clear(); }

 private:
  std::vector<Stranger> sockets_;
};

}  // namespace zensync::test
