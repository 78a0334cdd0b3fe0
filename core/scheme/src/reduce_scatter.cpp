// The sparse reduce-scatter; see reduce_scatter.hpp. Place: scheme, level 3.
//
// One exchange: each rank sends each owner its non-zero units (blocks of slots as in the balanced
// push), the owner adds all messages in rank order and writes the sums into its shard, which holds
// +0.0 elsewhere. Rows are a `range` partition of rows, which is torch's chunking; columns a
// `cyclic` partition of row parts. Either way the slot of a unit is its place in the owner's shard.
// Bytes: the push of ZEN (OSDI'25, section 3); rows of frequency-ordered ids meet few owners, row
// parts are spread evenly whatever the ids are.
#include "zensync/scheme/reduce_scatter.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "encode.hpp"
#include "receive.hpp"

namespace zensync {
namespace {

Partition shards(ShardLayout layout, std::uint64_t units, int size) {
  const bool rows = layout == ShardLayout::kRows;
  return {rows ? PartitionKind::kRange : PartitionKind::kCyclic, units, size, 0};
}

void send_units(SchemeContext& context, const Partition& partition, ShardCounts& counts) {
  Workspace& work = *context.workspace;
  auto& writers = work.push[0];
  MessageHeader header = make_header(context, MessageKind::kScatter, 0);
  header.values_dtype = context.source->dtype();
  for (MessageWriter& writer : writers) {
    writer.begin(*context.kernels, header, {&context.job, 1}, partition.slots());
  }
  MessageHeader totals;
  encode_range(context, {&partition, &work.split_owners, 0, partition.slots()}, writers, totals);
  const std::size_t unit_bytes = std::max(context.unit_bytes(), context.sum_bytes());
  const auto capacity = longest_message(partition.slots(), unit_bytes, true);
  for (int owner = 0; owner < context.size(); ++owner) {
    const auto index = static_cast<std::size_t>(owner);
    const bool self = owner == context.rank.value;
    MessageWriter& writer = writers[index];
    writer.header().total_units = totals.total_units;
    writer.header().total_elements = totals.total_elements;
    const auto bytes = writer.finish(context.wire.verify && !self);
    counts.sent_units[index] = writer.header().units;
    if (self) continue;
    work.exchange.sends.push_back({Rank{owner}, bytes});
    work.exchange.recvs.push_back({Rank{owner}, capacity, &work.received_push[index]});
  }
}

Status add_units(SchemeContext& context, const Partition& partition, ShardCounts& counts) {
  Workspace& work = *context.workspace;
  std::vector<const SparseSet*> order;
  for (int peer = 0; peer < context.size(); ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    const bool self = peer == context.rank.value;
    Incoming incoming;
    incoming.from = Rank{peer};
    incoming.expected = expect(context, MessageKind::kScatter, 0, partition.slots());
    incoming.expected.job_headers = 1;
    if (self) incoming.expected.verify = false;
    incoming.partition = &partition;
    incoming.owner = context.rank;
    incoming.message =
        self ? std::as_const(work.push[0][index]).bytes() : work.received_push[index].bytes();
    auto header = receive_set(context, incoming, work.sets[index]);
    if (!header.ok()) return header.status();
    counts.received_units[index] = header.value().units;
    counts.largest_units = std::max(counts.largest_units, header.value().total_units);
    order.push_back(&work.sets[index]);
  }
  work.adder.add(*context.kernels, order, context.plan.width, context.spec.dtype, work.sums);
  counts.shard_units = work.sums.units();
  finish_set(context, work.sums, work.final_values);
  return {};
}

/// Slots are places in the shard, so the sink sees it as a whole tensor of its own.
void write_shard(SchemeContext& context, const Partition& partition, const ShardTarget& target) {
  const std::uint64_t elems =
      shard_elems(context.spec, context.size(), context.rank, target.layout);
  if (elems == 0) return;
  std::memset(target.output, 0, elems * dtype_bytes(context.spec.dtype));
  const Partition whole = Partition::whole(partition.slots());
  UnitSink sink;
  sink.start_dense(target.output, context.unit_bytes());
  sink.put(*context.kernels, {&whole, Rank{0}, 0}, context.workspace->sums);
}

}  // namespace

double ShardCounts::imbalance() const {
  std::uint64_t most = 0;
  std::uint64_t total = 0;
  for (std::uint64_t units : sent_units) {
    most = std::max(most, units);
    total += units;
  }
  if (total == 0) return 1.0;
  return static_cast<double>(most) * static_cast<double>(sent_units.size()) /
         static_cast<double>(total);
}

Result<std::uint64_t> shard_width(const TensorSpec& spec, int size, ShardLayout layout) {
  if (spec.layout != Layout::kDense) {
    return make_error(ErrorKind::kUnsupported, "reduce_scatter is for dense-stored tensors");
  }
  const auto parts = layout == ShardLayout::kRows ? 1 : static_cast<std::uint64_t>(size);
  if (spec.row_elems % parts != 0) {
    return make_error(ErrorKind::kUnsupported, "rows of " + std::to_string(spec.row_elems) +
                                                   " elements cannot be cut into " +
                                                   std::to_string(size) +
                                                   " equal parts, one for each rank");
  }
  const std::uint64_t width = std::max<std::uint64_t>(spec.row_elems / parts, 1);
  if (spec.elems() / width > std::numeric_limits<std::uint32_t>::max()) {
    return make_error(ErrorKind::kCapacity, "reduce_scatter takes less than 2^32 units");
  }
  return width;
}

std::uint64_t shard_elems(const TensorSpec& spec, int size, Rank rank, ShardLayout layout) {
  const auto n = static_cast<std::uint64_t>(size);
  if (layout == ShardLayout::kColumns) return spec.elems() / n;
  const std::uint64_t most = div_ceil(spec.rows, n);
  const std::uint64_t begin = std::min(spec.rows, static_cast<std::uint64_t>(rank.value) * most);
  return std::min(most, spec.rows - begin) * spec.row_elems;
}

SchemeTask reduce_scatter(SchemeContext& context, ShardTarget target) {
  const auto width = shard_width(context.spec, context.size(), target.layout);
  if (!width.ok()) co_return width.status();
  const Partition partition = shards(target.layout, context.units(), context.size());
  ShardCounts counts;
  counts.sent_units.assign(static_cast<std::size_t>(context.size()), 0);
  counts.received_units = counts.sent_units;
  Exchange& exchange = context.workspace->exchange;
  exchange.clear();
  send_units(context, partition, counts);
  exchange.phase = "scatter";
  co_yield &exchange;
  if (Status status = add_units(context, partition, counts); !status.ok()) co_return status;
  write_shard(context, partition, target);
  if (target.counts != nullptr) *target.counts = std::move(counts);
  co_return Status();
}

std::vector<RankTraffic> reduce_scatter_traffic(const TrafficInput& input, ShardLayout layout) {
  std::vector<RankTraffic> ranks(static_cast<std::size_t>(input.size));
  const Partition partition = shards(layout, input.units(), input.size);
  for (int owner = 0; owner < input.size; ++owner) {
    for (int from = 0; from < input.size; ++from) {
      if (from == owner) continue;
      const SlotRange range{&partition, Rank{owner}, 0, partition.slots()};
      const IndexTraffic push = index_traffic(input, {&from, 1}, range);
      book(ranks, from, owner, message_bytes(1, push.units, input.own_bytes(from), push.bytes));
    }
  }
  return ranks;
}

}  // namespace zensync
