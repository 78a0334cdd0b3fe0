// What a scheme and a driver say to each other: messages to send, messages to wait for.
// Place: scheme, level 3; no I/O here. A scheme is a coroutine (scheme_task.hpp) that yields an
// Exchange; the driver performs it and resumes the scheme. Memory is the scheme's workspace.
//
// Rules, equal for every driver:
//  - Between two ranks messages arrive in the order in which they were sent; a message is received
//    by the oldest Recv from that peer.
//  - An exchange ends when all its `recvs` have arrived. Its sends may still be under way then:
//    their bytes must stay as they are until the *next* exchange of the job has ended, or the job
//    has (its driver is flushed then).
//  - A message sent in exchange j is awaited by its receiver in its exchange j or j + 1, so no set
//    of ranks that runs one scheme can block itself. One exception: in recursive doubling a rank
//    that was folded away awaits the result from its first exchange on. Nobody waits for it
//    meanwhile.
//  - A message longer than Recv::capacity_bytes is an error (kCorruptMessage), and no byte of it is
//    stored.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "zensync/base/buffer.hpp"
#include "zensync/base/types.hpp"

namespace zensync {

/// Bytes in front of each message on the wire: its length. Counted as wire bytes by every driver.
inline constexpr std::uint64_t kFramePrefixBytes = 8;

struct Send {
  Rank to;
  std::span<const std::byte> message;
};

struct Recv {
  Rank from;
  std::uint64_t capacity_bytes = 0;  ///< the longest message that the scheme can expect here
  Buffer* into = nullptr;            ///< resized by the driver to the length of the message
};

struct Exchange {
  std::vector<Send> sends;
  std::vector<Recv> recvs;
  const char* phase = "";  ///< what is exchanged ("push", "pull", …), for warnings and traces
  void clear() {
    sends.clear();
    recvs.clear();
  }
};

}  // namespace zensync
