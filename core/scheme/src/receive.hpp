// From a received message to a checked set of units, with errors that name peer and tensor.
// Place: scheme, internal. Sets point into the received bytes. Fails with kCorruptMessage,
// kMismatch.
#pragma once

#include "zensync/scheme/context.hpp"

namespace zensync {

/// Where a message carries a job header, at least this much is received: its sender's tensor may
/// have another, larger shape, and the message must be there before its header can say so. (Above
/// this the same mistake is a kCorruptMessage.)
inline constexpr std::uint64_t kHeaderCapacityBytes = 1ULL << 30;

/// The longest message over `slots` slots with units of `unit_bytes`.
std::uint64_t longest_message(std::uint64_t slots, std::uint64_t unit_bytes, bool job_header);

struct Incoming {
  Rank from;
  std::span<const std::byte> message;
  Expected expected;
  /// If set: units must exist at these slots.
  const Partition* partition = nullptr;
  Rank owner;
  std::uint64_t slot_lo = 0;
};

/// `error` with what is known here: this rank, the peer, the tensor.
Error at_peer(const SchemeContext& context, Rank peer, Error error);

Expected expect(const SchemeContext& context, MessageKind kind, std::size_t chunk,
                std::uint64_t slots);

/// Parses, compares job headers, reads the set; returns the message's header.
Result<MessageHeader> receive_set(const SchemeContext& context, const Incoming& incoming,
                                  SparseSet& set);

/// Parses a message and checks its job header (if one is expected), without a set.
Result<ParsedMessage> receive_message(const SchemeContext& context, const Incoming& incoming);

}  // namespace zensync
