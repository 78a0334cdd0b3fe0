// AGsparse: everybody sends all its units to everybody; each rank adds all of them in rank order.
// Place: scheme. One message per pair of ranks, 2(n − 1)·d·M/b in the ZEN paper's table; the simple
// rival, and the best choice for very few units at small n. All ranks add the same messages in the
// same order: equal bits.
#include <algorithm>
#include <utility>

#include "encode.hpp"
#include "receive.hpp"
#include "zensync/scheme/context.hpp"
#include "zensync/scheme/traffic.hpp"

namespace zensync {
namespace {

void send_all(SchemeContext& context, const Partition& whole) {
  Workspace& work = *context.workspace;
  MessageWriter& writer = work.pull[0];
  MessageHeader header = make_header(context, MessageKind::kGather, 0);
  header.values_dtype = context.source->dtype();
  writer.begin(*context.kernels, header, {&context.job, 1}, whole.slots());
  MessageHeader totals;
  encode_range(context, {&whole, &work.split_whole, 0, whole.slots()}, {&writer, 1}, totals);
  writer.header().total_units = totals.total_units;
  writer.header().total_elements = totals.total_elements;
  const auto bytes = writer.finish(context.wire.verify);
  const std::size_t unit_bytes = std::max(context.unit_bytes(), context.sum_bytes());
  const auto capacity = longest_message(whole.slots(), unit_bytes, true);
  for (int peer = 0; peer < context.size(); ++peer) {
    if (peer == context.rank.value) continue;
    work.exchange.sends.push_back({Rank{peer}, bytes});
    work.exchange.recvs.push_back(
        {Rank{peer}, capacity, &work.received_pull[static_cast<std::size_t>(peer)]});
  }
}

Status add_all(SchemeContext& context, const Partition& whole) {
  Workspace& work = *context.workspace;
  std::vector<const SparseSet*> order;
  for (int peer = 0; peer < context.size(); ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    Incoming incoming;
    incoming.from = Rank{peer};
    incoming.expected = expect(context, MessageKind::kGather, 0, whole.slots());
    incoming.expected.job_headers = 1;
    incoming.message = work.received_pull[index].bytes();
    if (peer == context.rank.value) {
      incoming.message = std::as_const(work.pull[0]).bytes();
      incoming.expected.verify = false;
    }
    auto header = receive_set(context, incoming, work.sets[index]);
    if (!header.ok()) return header.status();
    context.counts->units[index] = header.value().total_units;
    context.counts->elements[index] = header.value().total_elements;
    order.push_back(&work.sets[index]);
  }
  work.adder.add(*context.kernels, order, context.plan.width, context.spec.dtype, work.sums);
  finish_set(context, work.sums, work.final_values);
  context.sink->put(*context.kernels, {&whole, Rank{0}, 0}, work.sums);
  return context.sink->end_chunk();
}

}  // namespace

SchemeTask agsparse(SchemeContext& context) {
  const Partition whole = Partition::whole(context.units());
  Exchange& exchange = context.workspace->exchange;
  exchange.clear();
  context.counts->units.assign(static_cast<std::size_t>(context.size()), 0);
  context.counts->elements.assign(static_cast<std::size_t>(context.size()), 0);
  send_all(context, whole);
  exchange.phase = "gather";
  co_yield &exchange;
  if (Status status = add_all(context, whole); !status.ok()) co_return status;
  context.counts->union_units = context.sink->union_units();
  context.counts->histogram = context.sink->histogram();
  context.counts->width = context.plan.width;
  co_return Status();
}

std::vector<RankTraffic> agsparse_traffic(const TrafficInput& input) {
  std::vector<RankTraffic> ranks(static_cast<std::size_t>(input.size));
  const Partition whole = Partition::whole(input.units());
  for (int from = 0; from < input.size; ++from) {
    const IndexTraffic all = index_traffic(input, {&from, 1}, {&whole, Rank{0}, 0, whole.slots()});
    for (int to = 0; to < input.size; ++to) {
      if (to == from) continue;
      book(ranks, from, to, message_bytes(1, all.units, input.own_bytes(from), all.bytes));
    }
  }
  return ranks;
}

}  // namespace zensync
