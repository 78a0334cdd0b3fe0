// One message, written piece by piece and read with every field checked.
// Place: codec, level 2. Layout: MessageHeader (48) | job headers (64 each) | values | index.
// Values stand first so that they can be written while units are found, before their number is
// known (docs/adr/0004).
// A MessageWriter owns its message and keeps the memory, so that a warm job does not allocate; what
// it has handed out holds until its next call. What is parsed points into the received bytes.
// Threads: one at a time.
// Bytes from a peer are checked in two steps, `parse_message` and `read_set`. Errors: kMismatch
// where the peer is at another place of the program, kCorruptMessage for all else; memory:
// std::bad_alloc.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "zensync/base/result.hpp"
#include "zensync/codec/headers.hpp"
#include "zensync/codec/index_codec.hpp"
#include "zensync/codec/sparse_set.hpp"
#include "zensync/kernels/kernels.hpp"

namespace zensync {

class MessageWriter {
 public:
  /// Starts a message over `slots` slots. `header.codec` is the wanted codec (choose_index
  /// decides); units, index_bytes, digest are filled by `finish`.
  void begin(const kernels::Table& table, const MessageHeader& header,
             std::span<const JobHeader> job_headers, std::uint64_t slots);
  /// Room for `bytes` more bytes of values; valid until the next call.
  std::byte* add_values(std::size_t bytes);
  /// Units of block `block`, after those of lower blocks; none if `offsets` is empty.
  void add_block(std::uint64_t block, std::span<const std::uint16_t> offsets);
  /// All runs of `set`, and its values (`values_bytes` of them).
  void add_set(const SparseSet& set, std::size_t values_bytes);
  /// For dense values (ring): states their number.
  void set_units(std::uint32_t units) { header_.units = units; }
  /// Completes header and digest; the bytes stay valid until `begin`.
  std::span<const std::byte> finish(bool verify);

  MessageHeader& header() { return header_; }
  std::span<const std::byte> bytes() const { return buffer_.bytes(); }

 private:
  const kernels::Table* table_ = nullptr;
  MessageHeader header_;
  IndexCodec policy_ = IndexCodec::kBlocks;
  std::uint64_t slots_ = 0;
  std::uint64_t next_block_ = 0;
  Buffer buffer_;                   ///< headers and values, at the end the index too
  Buffer index_;                    ///< blocks so far
  std::vector<std::uint64_t> raw_;  ///< the first slots, in case they go raw
};

/// What the reader knows beforehand; a message that says otherwise is refused.
struct Expected {
  MessageKind kind = MessageKind::kPush;
  std::uint32_t sequence = 0;
  std::uint16_t chunk = 0;
  std::uint16_t job_headers = 0;
  std::uint64_t slots = 0;    ///< of the range that the message covers
  std::uint64_t width = 1;    ///< elements per unit
  DType dtype = DType::kF32;  ///< of the tensor, and of the values
  bool partial_sums = false;  ///< values may be of sum_dtype(dtype) as well
  bool verify = true;
};

struct ParsedMessage {
  MessageHeader header;
  std::span<const std::byte> job_headers;  ///< 64 bytes each, maybe not aligned
  std::span<const std::byte> values;
  std::span<const std::byte> index;
};

/// Checks length, version and digest of a message and finds its parts; reads no index. What the
/// message claims to be is checked by `read_set` (or, where there is no index, by the scheme).
Result<ParsedMessage> parse_message(std::span<const std::byte> message, const Expected& expected);

/// Job header `i` of a parsed message.
JobHeader job_header_of(const ParsedMessage& message, std::size_t i);

/// Reads index and values of a parsed message into `set` (values point into the message). Where
/// kind, sequence, chunk or number of job headers are not those expected, the error is kMismatch:
/// the peer is at another place.
Status read_set(const kernels::Table& table, const ParsedMessage& message, const Expected& expected,
                SparseSet& set);

/// Bytes of a message with `units` units of `unit_bytes` and an index of `index_bytes`.
constexpr std::uint64_t message_bytes(std::uint64_t job_headers, std::uint64_t units,
                                      std::uint64_t unit_bytes, std::uint64_t index_bytes) {
  return sizeof(MessageHeader) + job_headers * sizeof(JobHeader) + units * unit_bytes + index_bytes;
}

}  // namespace zensync
