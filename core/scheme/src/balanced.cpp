// The balanced scheme (default). Place: scheme.
//
// Every unit has an owner (partition). Push: each rank sends each owner its non-zero units. The
// owner adds them in rank order. Pull: each owner sends everybody every unit that at least one rank
// pushed, with its sum, also when that sum is zero. Chunks of slots overlap: in exchange t a rank
// sends the push of chunk t and the pull of chunk t − 2, and waits for the pushes of chunk t − 1
// and the pulls of chunk t − 3:
//
//   t           0        1        2              3              4
//   sends       push 0   push 1   push 2, pull 0  push 3, pull 1  …
//   waits for   –        push 0   push 1          push 2, pull 0  …
//
// so encoding chunk t + 1, adding chunk t − 1 and decoding chunk t − 3 happen while other chunks
// travel. Two generations of messages suffice: what is written after exchange t replaces what left
// before exchange t. Bytes: push + pull of ZEN (OSDI'25, section 3), both with block codecs.
#include <algorithm>
#include <numeric>
#include <utility>

#include "encode.hpp"
#include "receive.hpp"
#include "zensync/scheme/context.hpp"
#include "zensync/scheme/traffic.hpp"

namespace zensync {
namespace {

class BalancedJob {
 public:
  explicit BalancedJob(SchemeContext& context)
      : context_(context),
        work_(*context.workspace),
        partition_(context.wire.partition, context.units(), context.size(), context.job.key),
        chunks_(context.plan.chunk_ends.size()) {
    context.counts->units.assign(static_cast<std::size_t>(context.size()), 0);
    context.counts->elements.assign(static_cast<std::size_t>(context.size()), 0);
  }

  std::size_t chunks() const { return chunks_; }

  /// Encodes the push of `chunk` and adds its sends to the exchange.
  void send_push(std::size_t chunk) {
    auto& writers = work_.push[chunk % 2];
    const std::uint64_t slots = end(chunk) - begin(chunk);
    const bool first = chunk == 0;
    for (MessageWriter& writer : writers) {
      writer.begin(*context_.kernels, push_header(chunk), job_headers(first), slots);
    }
    encode_range(context_, {&partition_, &work_.split_owners, begin(chunk), end(chunk)}, writers,
                 totals_);
    for (int owner = 0; owner < context_.size(); ++owner) {
      MessageWriter& writer = writers[static_cast<std::size_t>(owner)];
      writer.header().total_units = totals_.total_units;
      writer.header().total_elements = totals_.total_elements;
      const bool self = owner == context_.rank.value;
      const auto bytes = writer.finish(context_.wire.verify && !self);
      if (!self) work_.exchange.sends.push_back({Rank{owner}, bytes});
    }
  }

  void await_push(std::size_t chunk) {
    const std::size_t unit_bytes = std::max(context_.unit_bytes(), context_.sum_bytes());
    const auto capacity = longest_message(end(chunk) - begin(chunk), unit_bytes, chunk == 0);
    await(work_.received_push, capacity);
  }

  /// Adds what was pushed to this rank and writes the pull message.
  Status encode_pull(std::size_t chunk) {
    if (Status status = add_pushes(chunk); !status.ok()) return status;
    MessageWriter& writer = work_.pull[chunk % 2];
    MessageHeader header = make_header(context_, MessageKind::kPull, chunk);
    header.values_dtype = context_.spec.dtype;
    pulled_units_ += work_.sums.units();
    header.total_units = pulled_units_;
    writer.begin(*context_.kernels, header, {}, end(chunk) - begin(chunk));
    writer.add_set(work_.sums, work_.sums.units() * context_.unit_bytes());
    writer.finish(context_.wire.verify);
    return {};
  }

  void send_pull(std::size_t chunk) {
    const auto bytes = std::as_const(work_.pull[chunk % 2]).bytes();
    for (int peer = 0; peer < context_.size(); ++peer) {
      if (peer != context_.rank.value) work_.exchange.sends.push_back({Rank{peer}, bytes});
    }
  }

  void await_pull(std::size_t chunk) {
    const auto capacity = longest_message(end(chunk) - begin(chunk), context_.unit_bytes(), false);
    await(work_.received_pull, capacity);
  }

  /// Writes the sums of all owners back.
  Status take_pulls(std::size_t chunk) {
    for (int owner = 0; owner < context_.size(); ++owner) {
      SparseSet& set = work_.sets[static_cast<std::size_t>(owner)];
      Incoming incoming = incoming_from(owner, MessageKind::kPull, chunk);
      incoming.owner = Rank{owner};
      const bool self = owner == context_.rank.value;
      incoming.message = self ? std::as_const(work_.pull[chunk % 2]).bytes()
                              : work_.received_pull[static_cast<std::size_t>(owner)].bytes();
      if (self) incoming.expected.verify = false;
      auto header = receive_set(context_, incoming, set);
      if (!header.ok()) return header.status();
      context_.sink->put(*context_.kernels, {&partition_, Rank{owner}, begin(chunk)}, set);
    }
    return context_.sink->end_chunk();
  }

  void finish() {
    context_.counts->union_units = context_.sink->union_units();
    context_.counts->histogram = context_.sink->histogram();
    context_.counts->width = context_.plan.width;
  }

 private:
  std::uint64_t begin(std::size_t chunk) const {
    return chunk == 0 ? 0 : context_.plan.chunk_ends[chunk - 1];
  }
  std::uint64_t end(std::size_t chunk) const { return context_.plan.chunk_ends[chunk]; }
  std::span<const JobHeader> job_headers(bool first) const {
    return {&context_.job, first ? std::size_t{1} : 0};
  }
  MessageHeader push_header(std::size_t chunk) const {
    MessageHeader header = make_header(context_, MessageKind::kPush, chunk);
    header.values_dtype = context_.source->dtype();
    return header;
  }

  void await(std::vector<Buffer>& buffers, std::uint64_t capacity) {
    for (int peer = 0; peer < context_.size(); ++peer) {
      if (peer == context_.rank.value) continue;
      work_.exchange.recvs.push_back(
          {Rank{peer}, capacity, &buffers[static_cast<std::size_t>(peer)]});
    }
  }

  Incoming incoming_from(int peer, MessageKind kind, std::size_t chunk) const {
    Incoming incoming;
    incoming.from = Rank{peer};
    incoming.expected = expect(context_, kind, chunk, end(chunk) - begin(chunk));
    incoming.partition = &partition_;
    incoming.slot_lo = begin(chunk);
    return incoming;
  }

  Status add_pushes(std::size_t chunk) {
    std::vector<const SparseSet*>& order = order_;
    order.clear();
    for (int peer = 0; peer < context_.size(); ++peer) {
      const auto index = static_cast<std::size_t>(peer);
      SparseSet& set = work_.sets[index];
      Incoming incoming = incoming_from(peer, MessageKind::kPush, chunk);
      incoming.owner = context_.rank;
      incoming.expected.job_headers = chunk == 0 ? 1 : 0;
      const bool self = peer == context_.rank.value;
      incoming.message = self ? std::as_const(work_.push[chunk % 2][index]).bytes()
                              : work_.received_push[index].bytes();
      if (self) incoming.expected.verify = false;
      auto header = receive_set(context_, incoming, set);
      if (!header.ok()) return header.status();
      context_.counts->units[index] = header.value().total_units;
      context_.counts->elements[index] = header.value().total_elements;
      order.push_back(&set);
    }
    work_.adder.add(*context_.kernels, order, context_.plan.width, context_.spec.dtype, work_.sums);
    finish_set(context_, work_.sums, work_.final_values);
    return {};
  }

  SchemeContext& context_;
  Workspace& work_;
  Partition partition_;
  std::size_t chunks_;
  MessageHeader totals_;
  std::uint64_t pulled_units_ = 0;
  std::vector<const SparseSet*> order_;
};

}  // namespace

SchemeTask balanced(SchemeContext& context) {
  BalancedJob job(context);
  Exchange& exchange = context.workspace->exchange;
  const std::size_t chunks = job.chunks();
  for (std::size_t t = 0; t < chunks + 3; ++t) {
    exchange.clear();
    exchange.phase = t < 2 ? "push" : t <= chunks ? "push and pull" : "pull";
    if (t < chunks) job.send_push(t);
    if (t >= 2 && t - 2 < chunks) job.send_pull(t - 2);
    if (t >= 1 && t - 1 < chunks) job.await_push(t - 1);
    if (t >= 3) job.await_pull(t - 3);
    co_yield &exchange;
    if (t >= 3) {
      if (Status status = job.take_pulls(t - 3); !status.ok()) co_return status;
    }
    if (t >= 1 && t - 1 < chunks) {
      if (Status status = job.encode_pull(t - 1); !status.ok()) co_return status;
    }
  }
  job.finish();
  co_return Status();
}

std::vector<RankTraffic> balanced_traffic(const TrafficInput& input) {
  std::vector<RankTraffic> ranks(static_cast<std::size_t>(input.size));
  std::vector<int> everybody(ranks.size());
  std::iota(everybody.begin(), everybody.end(), 0);
  const Partition partition(input.wire.partition, input.units(), input.size, input.key);
  std::uint64_t begin = 0;
  for (std::size_t chunk = 0; chunk < input.plan.chunk_ends.size(); ++chunk) {
    for (int owner = 0; owner < input.size; ++owner) {
      const SlotRange range{&partition, Rank{owner}, begin, input.plan.chunk_ends[chunk]};
      const IndexTraffic pull = index_traffic(input, everybody, range);
      for (int peer = 0; peer < input.size; ++peer) {
        if (peer == owner) continue;
        const IndexTraffic push = index_traffic(input, {&peer, 1}, range);
        book(ranks, peer, owner,
             message_bytes(chunk == 0, push.units, input.own_bytes(peer), push.bytes));
        book(ranks, owner, peer, message_bytes(0, pull.units, input.unit_bytes(), pull.bytes));
      }
    }
    begin = input.plan.chunk_ends[chunk];
  }
  return ranks;
}

}  // namespace zensync
