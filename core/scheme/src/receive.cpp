// Receiving: parse, compare, decode, check that every unit exists. Place: scheme.
// Fails with kCorruptMessage or kMismatch; the error names the peer, the tensor and the message.
#include "receive.hpp"

#include <algorithm>

namespace zensync {
namespace {

bool units_exist(const Incoming& incoming, const SparseSet& set) {
  if (incoming.partition == nullptr || set.runs.empty()) return true;
  const Partition& partition = *incoming.partition;
  const BlockRun& run = set.runs.back();
  const std::uint64_t slot =
      incoming.slot_lo + run.block * kernels::kBlockSlots + set.offsets[run.begin + run.count - 1];
  if (partition.kind() != PartitionKind::kRange && slot + 1 < partition.slots()) return true;
  return partition.unit_at(incoming.owner, slot) < partition.units();
}

}  // namespace

Error at_peer(const SchemeContext& context, Rank peer, Error error) {
  error.rank = context.rank;
  error.culprit = peer;
  if (error.tensor.empty()) error.tensor = context.tensor;
  if (error.kind == ErrorKind::kCorruptMessage) {
    error.message =
        "message from rank " + std::to_string(peer.value) + " is corrupt: " + error.message;
  }
  return error;
}

std::uint64_t longest_message(std::uint64_t slots, std::uint64_t unit_bytes, bool job_header) {
  // A block costs at most 2^14 bits, 3 bytes of count, 10 of skipped blocks; raw at most 8 a unit.
  const std::uint64_t index = slots * 8 + div_ceil(slots, kernels::kBlockSlots) * 16;
  const std::uint64_t longest = message_bytes(1, slots, unit_bytes, index);
  return job_header ? std::max(longest, kHeaderCapacityBytes) : longest;
}

Expected expect(const SchemeContext& context, MessageKind kind, std::size_t chunk,
                std::uint64_t slots) {
  Expected expected;
  expected.kind = kind;
  expected.sequence = context.job.sequence;
  expected.chunk = static_cast<std::uint16_t>(chunk);
  expected.slots = slots;
  expected.width = context.plan.width;
  expected.dtype = context.spec.dtype;
  expected.partial_sums = kind == MessageKind::kPush || kind == MessageKind::kGather ||
                          kind == MessageKind::kDouble || kind == MessageKind::kScatter;
  expected.verify = context.wire.verify;
  return expected;
}

Result<ParsedMessage> receive_message(const SchemeContext& context, const Incoming& incoming) {
  auto parsed = parse_message(incoming.message, incoming.expected);
  if (!parsed.ok()) return at_peer(context, incoming.from, parsed.error());
  for (std::size_t i = 0; i < parsed.value().header.job_headers; ++i) {
    if (incoming.expected.job_headers != 1) break;
    Status status = check_job_header(context.job, job_header_of(parsed.value(), i), incoming.from,
                                     context.tensor);
    if (!status.ok()) return at_peer(context, incoming.from, status.error());
  }
  return parsed;
}

Result<MessageHeader> receive_set(const SchemeContext& context, const Incoming& incoming,
                                  SparseSet& set) {
  auto parsed = receive_message(context, incoming);
  if (!parsed.ok()) return parsed.error();
  Status status = read_set(*context.kernels, parsed.value(), incoming.expected, set);
  if (status.ok() && !units_exist(incoming, set)) {
    status = make_error(ErrorKind::kCorruptMessage, "index: a slot without a unit");
  }
  if (!status.ok()) return at_peer(context, incoming.from, status.error());
  return parsed.value().header;
}

}  // namespace zensync
