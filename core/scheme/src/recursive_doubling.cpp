// Recursive doubling for any n (SparCML's SSAR, with a fixed tree). Place: scheme.
//
// p = the largest power of two ≤ n.
//  1. Fold: ranks ≥ p send their units to rank − p, which adds them behind its own.
//  2. Double: in step k ranks whose numbers differ in bit k exchange the sums of their blocks of
//     2^k ranks, and both compute lower block + upper block.
//  3. Return: the folded ranks get the finished result.
// All ranks compute the same tree of additions, so bits are equal. A message of one rank's own
// units carries the tensor's dtype; partial sums carry fp32 for 16-bit floats. The counts of the
// ranks behind a sum travel with it, as 16 bytes each in front of the values.
#include <algorithm>
#include <bit>
#include <cstring>

#include "encode.hpp"
#include "receive.hpp"
#include "zensync/scheme/context.hpp"
#include "zensync/scheme/traffic.hpp"

namespace zensync {
namespace {

struct RankCount {
  std::uint64_t units;
  std::uint64_t elements;
};

int power_of(int size) { return static_cast<int>(std::bit_floor(static_cast<unsigned>(size))); }
int steps_of(int size) { return std::countr_zero(static_cast<unsigned>(power_of(size))); }

/// Ranks behind the sum of the block of 2^step ranks that holds `member` once folding is done,
/// ascending.
std::vector<int> behind(int member, int step, int size) {
  std::vector<int> ranks;
  const int begin = member >> step << step;
  for (int r = 0; r < size; ++r) {
    const int place = r < power_of(size) ? r : r - power_of(size);
    if (place >= begin && place < begin + (1 << step)) ranks.push_back(r);
  }
  return ranks;
}

class DoublingJob {
 public:
  explicit DoublingJob(SchemeContext& context)
      : context_(context),
        work_(*context.workspace),
        whole_(Partition::whole(context.units())),
        known_(static_cast<std::size_t>(context.size())) {
    context.counts->units.assign(static_cast<std::size_t>(context.size()), 0);
    context.counts->elements.assign(static_cast<std::size_t>(context.size()), 0);
  }

  int size() const { return context_.size(); }
  int rank() const { return context_.rank.value; }

  /// Finds this rank's units and decodes them into work.sums, as any later sum.
  Status start() {
    MessageWriter& writer = work_.push[0][0];
    MessageHeader header = make_header(context_, MessageKind::kDouble, 0);
    header.values_dtype = context_.source->dtype();
    writer.begin(*context_.kernels, header, {}, whole_.slots());
    MessageHeader totals;
    encode_range(context_, {&whole_, &work_.split_whole, 0, whole_.slots()}, {&writer, 1}, totals);
    writer.finish(false);
    set_count(rank(), {totals.total_units, totals.total_elements});
    Expected expected = expect(context_, MessageKind::kDouble, 0, whole_.slots());
    expected.verify = false;
    auto parsed = parse_message(writer.bytes(), expected);
    if (!parsed.ok()) return parsed.status();
    return read_set(*context_.kernels, parsed.value(), expected, work_.sums);
  }

  void send(int to, MessageKind kind, int step) {
    MessageWriter& writer = work_.pull[writer_ ^= 1];
    MessageHeader header = make_header(context_, kind, static_cast<std::size_t>(step));
    header.values_dtype = work_.sums.values_dtype;
    writer.begin(*context_.kernels, header, {&context_.job, 1}, whole_.slots());
    for (int r = 0; r < size(); ++r) {
      if (!known_[static_cast<std::size_t>(r)]) continue;
      const RankCount count{context_.counts->units[static_cast<std::size_t>(r)],
                            context_.counts->elements[static_cast<std::size_t>(r)]};
      std::memcpy(writer.add_values(sizeof count), &count, sizeof count);
    }
    writer.add_set(work_.sums,
                   work_.sums.units() * context_.plan.width * dtype_bytes(work_.sums.values_dtype));
    work_.exchange.sends.push_back({Rank{to}, writer.finish(context_.wire.verify)});
  }

  void await(int from) {
    const std::size_t unit_bytes = std::max(context_.unit_bytes(), context_.sum_bytes());
    const auto capacity = longest_message(whole_.slots(), unit_bytes, true);
    work_.exchange.recvs.push_back({Rank{from}, capacity, &work_.received_pull[0]});
  }

  /// Reads the message from `from`, whose sum is over `ranks`, into `set`.
  Status receive(int from, MessageKind kind, int step, const std::vector<int>& ranks,
                 SparseSet& set) {
    Incoming incoming;
    incoming.from = Rank{from};
    incoming.message = work_.received_pull[0].bytes();
    incoming.expected = expect(context_, kind, static_cast<std::size_t>(step), whole_.slots());
    incoming.expected.job_headers = 1;
    auto parsed = receive_message(context_, incoming);
    if (!parsed.ok()) return parsed.status();
    ParsedMessage& message = parsed.value();
    if (message.values.size() < ranks.size() * sizeof(RankCount)) {
      return at_peer(context_, Rank{from},
                     make_error(ErrorKind::kCorruptMessage, "shorter than its counts"));
    }
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      RankCount count;
      std::memcpy(&count, message.values.data() + i * sizeof count, sizeof count);
      set_count(ranks[i], count);
    }
    message.values = message.values.subspan(ranks.size() * sizeof(RankCount));
    Status status = read_set(*context_.kernels, message, incoming.expected, set);
    return status.ok() ? status : Status(at_peer(context_, Rank{from}, status.error()));
  }

  /// work.sums = lower + upper, where one of both is work.sums and the other work.other.
  void add(bool mine_is_lower) {
    const SparseSet* order[] = {mine_is_lower ? &work_.sums : &work_.other,
                                mine_is_lower ? &work_.other : &work_.sums};
    work_.adder.add(*context_.kernels, order, context_.plan.width, context_.spec.dtype,
                    work_.spare);
    std::swap(work_.spare, work_.sums);
  }

  void finish_sums() {
    if (size() == 1) {  // no addition took place: bring the units into a sum, from +0.0
      const SparseSet* order[] = {&work_.sums};
      work_.adder.add(*context_.kernels, order, context_.plan.width, context_.spec.dtype,
                      work_.spare);
      std::swap(work_.spare, work_.sums);
    }
    finish_set(context_, work_.sums, work_.final_values);
  }

  Status write_back() {
    context_.sink->put(*context_.kernels, {&whole_, Rank{0}, 0}, work_.sums);
    if (Status status = context_.sink->end_chunk(); !status.ok()) return status;
    context_.counts->union_units = context_.sink->union_units();
    context_.counts->histogram = context_.sink->histogram();
    context_.counts->width = context_.plan.width;
    return {};
  }

 private:
  void set_count(int r, RankCount count) {
    const auto index = static_cast<std::size_t>(r);
    context_.counts->units[index] = count.units;
    context_.counts->elements[index] = count.elements;
    known_[index] = true;
  }

  SchemeContext& context_;
  Workspace& work_;
  Partition whole_;
  std::vector<bool> known_;
  int writer_ = 0;
};

}  // namespace

SchemeTask recursive_doubling(SchemeContext& context) {
  DoublingJob job(context);
  Exchange& exchange = context.workspace->exchange;
  SparseSet& other = context.workspace->other;
  const int power = power_of(context.size());
  const int rank = context.rank.value;
  const bool folded = rank >= power;
  if (Status status = job.start(); !status.ok()) co_return status;
  exchange.clear();
  exchange.phase = "fold";
  if (folded) {
    job.send(rank - power, MessageKind::kDouble, 0);
    job.await(rank - power);
    co_yield &exchange;
    const auto all = behind(0, steps_of(context.size()), context.size());
    SparseSet& sums = context.workspace->sums;
    Status status = job.receive(rank - power, MessageKind::kReturn, 0, all, sums);
    if (!status.ok()) co_return status;
    co_return job.write_back();
  }
  if (rank + power < context.size()) {
    job.await(rank + power);
    co_yield &exchange;
    Status status = job.receive(rank + power, MessageKind::kDouble, 0, {rank + power}, other);
    if (!status.ok()) co_return status;
    job.add(true);
  }
  for (int step = 0; 1 << step < power; ++step) {
    const int peer = rank ^ (1 << step);
    exchange.clear();
    exchange.phase = "double";
    job.send(peer, MessageKind::kDouble, step + 1);
    job.await(peer);
    co_yield &exchange;
    const auto ranks = behind(peer, step, context.size());
    Status status = job.receive(peer, MessageKind::kDouble, step + 1, ranks, other);
    if (!status.ok()) co_return status;
    job.add(rank < peer);
  }
  job.finish_sums();
  if (rank + power < context.size()) {
    exchange.clear();
    exchange.phase = "return";
    job.send(rank + power, MessageKind::kReturn, 0);
    co_yield &exchange;
  }
  co_return job.write_back();
}

std::vector<RankTraffic> recursive_doubling_traffic(const TrafficInput& input) {
  std::vector<RankTraffic> ranks(static_cast<std::size_t>(input.size));
  const Partition whole = Partition::whole(input.units());
  const int power = power_of(input.size);
  const auto send = [&](int from, int to, const std::vector<int>& block, std::uint64_t unit_bytes) {
    const IndexTraffic index = index_traffic(input, block, {&whole, Rank{0}, 0, whole.slots()});
    book(ranks, from, to,
         message_bytes(1, index.units, unit_bytes, index.bytes + block.size() * sizeof(RankCount)));
  };
  for (int rank = power; rank < input.size; ++rank) {
    send(rank, rank - power, {rank}, input.own_bytes(rank));
    send(rank - power, rank, behind(0, steps_of(input.size), input.size), input.unit_bytes());
  }
  for (int step = 0; step < steps_of(input.size); ++step) {
    for (int rank = 0; rank < power; ++rank) {
      const std::vector<int> block = behind(rank, step, input.size);
      send(rank, rank ^ (1 << step), block,
           block.size() == 1 ? input.own_bytes(rank) : input.sum_bytes());
    }
  }
  return ranks;
}

}  // namespace zensync
