// Messages for tests: bytes that tell who sent them and which they are, and exchanges made of them.
// Place: tests of driver. Pure values; `Outbox` keeps what was sent for as long as the rules ask.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "zensync/base/hash.hpp"
#include "zensync/driver/driver.hpp"

namespace zensync::test {

inline std::uint64_t mix(std::uint64_t a, std::uint64_t b, std::uint64_t c = 0) {
  return mix64(mix64(mix64(a) ^ b) ^ c);
}

/// Byte `i` of message `number` from `from` to `to`.
inline std::byte byte_of(std::uint64_t seed, std::size_t i) {
  return static_cast<std::byte>((seed + i * 131 + (i >> 8)) & 255);
}

inline std::uint64_t seed_of(int from, int to, int number) {
  return mix(static_cast<std::uint64_t>(from), static_cast<std::uint64_t>(to),
             static_cast<std::uint64_t>(number));
}

/// Sizes around everything that matters: nothing, tiny, a frame, more than staging.
inline std::size_t size_of(std::uint64_t seed) {
  switch (mix64(seed) % 6) {
    case 0:
      return 0;
    case 1:
      return seed % 17;
    case 2:
      return seed % 3000;
    case 3:
      return 65536 - 8 + seed % 3;
    case 4:
      return seed % 200000;
    default:
      return seed % 300;
  }
}

/// The bytes of any message with this seed repeat after so many.
inline constexpr std::size_t kPeriodBytes = 65536;

inline std::vector<std::byte> message_of(std::uint64_t seed, std::size_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  const std::size_t first = std::min(size_bytes, kPeriodBytes);
  for (std::size_t i = 0; i < first; ++i) bytes[i] = byte_of(seed, i);
  for (std::size_t at = first; at < size_bytes; at += kPeriodBytes) {
    std::memcpy(&bytes[at], bytes.data(), std::min(kPeriodBytes, size_bytes - at));
  }
  return bytes;
}

inline bool holds(const Buffer& buffer, std::uint64_t seed, std::size_t size_bytes) {
  if (buffer.size() != size_bytes) return false;
  if (size_bytes == 0) return true;
  const auto want = message_of(seed, size_bytes);
  return std::memcmp(buffer.data(), want.data(), size_bytes) == 0;
}

/// Owns messages until the exchange after theirs has ended.
class Outbox {
 public:
  /// Call before each exchange: messages of the one before the last are free.
  void turn() {
    old_.swap(now_);
    now_.clear();
  }
  Send add(int to, std::vector<std::byte> bytes) {
    now_.push_back(std::move(bytes));
    return {Rank{to}, now_.back()};
  }

 private:
  std::deque<std::vector<std::byte>> now_;
  std::deque<std::vector<std::byte>> old_;
};

/// An exchange that waits for one message from `from`, which must outlive it.
inline Exchange waiting_for(int from, Buffer& into, std::uint64_t capacity_bytes = 1 << 20) {
  Exchange exchange;
  exchange.recvs.push_back({Rank{from}, capacity_bytes, &into});
  return exchange;
}

}  // namespace zensync::test
