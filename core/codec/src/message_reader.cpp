// Reading messages: bytes from elsewhere are checked field by field before anything is used. Place:
// codec. Order of checks: length of the header, version, digest, then what the message claims to
// be, then sizes, then the index. A peer at another place of the program is kMismatch, all else
// kCorruptMessage.
#include <cstring>

#include "zensync/base/hash.hpp"
#include "zensync/codec/message.hpp"

namespace zensync {
namespace {

Error corrupt(const std::string& what) { return make_error(ErrorKind::kCorruptMessage, what); }

Status check_envelope(std::span<const std::byte> message, const MessageHeader& header,
                      const Expected& expected) {
  if (header.version != kWireVersion) {
    return corrupt("wire version " + std::to_string(header.version) + ", expected " +
                   std::to_string(kWireVersion));
  }
  constexpr std::size_t kDigestBytes = sizeof header.digest;
  if (expected.verify &&
      header.digest != digest64(message.data() + kDigestBytes, message.size() - kDigestBytes)) {
    return corrupt("digest does not match");
  }
  const int kind = static_cast<int>(header.kind);
  if (kind < 1 || kind > kMaxMessageKind) return corrupt("unknown kind of message");
  if (static_cast<int>(header.codec) > kMaxIndexCodec) return corrupt("unknown codec");
  if (!is_valid(header.values_dtype)) return corrupt("unknown dtype of values");
  return {};
}

}  // namespace

Result<ParsedMessage> parse_message(std::span<const std::byte> message, const Expected& expected) {
  if (message.size() < sizeof(MessageHeader)) return corrupt("shorter than a message header");
  ParsedMessage parsed;
  std::memcpy(&parsed.header, message.data(), sizeof(MessageHeader));
  const MessageHeader& header = parsed.header;
  if (Status status = check_envelope(message, header, expected); !status.ok()) {
    return status.error();
  }
  std::span<const std::byte> rest = message.subspan(sizeof(MessageHeader));
  const std::size_t job_bytes = header.job_headers * sizeof(JobHeader);
  if (rest.size() < job_bytes) return corrupt("shorter than its job headers");
  parsed.job_headers = rest.first(job_bytes);
  rest = rest.subspan(job_bytes);
  if (header.index_bytes > rest.size()) return corrupt("index longer than the message");
  parsed.index = rest.last(header.index_bytes);
  parsed.values = rest.first(rest.size() - header.index_bytes);
  return parsed;
}

JobHeader job_header_of(const ParsedMessage& message, std::size_t i) {
  JobHeader header;
  std::memcpy(&header, message.job_headers.data() + i * sizeof header, sizeof header);
  return header;
}

Status read_set(const kernels::Table& table, const ParsedMessage& message, const Expected& expected,
                SparseSet& set) {
  const MessageHeader& header = message.header;
  if (header.kind != expected.kind || header.sequence != expected.sequence ||
      header.chunk != expected.chunk || header.job_headers != expected.job_headers) {
    return make_error(
        ErrorKind::kMismatch,
        "the peer is at another place: message kind " +
            std::to_string(static_cast<int>(header.kind)) + " of job " +
            std::to_string(header.sequence) + ", step " + std::to_string(header.chunk) +
            "; expected kind " + std::to_string(static_cast<int>(expected.kind)) + " of job " +
            std::to_string(expected.sequence) + ", step " + std::to_string(expected.chunk));
  }
  const bool partial = expected.partial_sums && header.values_dtype == sum_dtype(expected.dtype);
  if (header.values_dtype != expected.dtype && !partial) {
    return corrupt("values of dtype " + std::string(dtype_name(header.values_dtype)));
  }
  const std::uint64_t unit_bytes = expected.width * dtype_bytes(header.values_dtype);
  if (message.values.size() != header.units * unit_bytes) {
    return corrupt("values do not fill the message");
  }
  set.values_dtype = header.values_dtype;
  set.values = message.values.data();
  return read_index(table, {header.codec, message.index, header.units, expected.slots}, set);
}

}  // namespace zensync
