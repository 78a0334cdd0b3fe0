// A dense ring all-reduce of our own, for C++ programs and tests (scheme "dense" of the Python
// package is Gloo's). Place: scheme. The tensor is cut into n segments. Reduce-scatter: in step s
// rank r sends its sum of segment r − s to r + 1 and adds what it gets of segment r − s − 1; after
// n − 1 steps it holds segment r + 1 complete. All-gather: complete segments go round. 2(n − 1)/n ·
// M per rank. Partial sums are fp32 for 16-bit floats, rounded once, before the all-gather, by the
// one rank that completes a segment: equal bits. Sums start from +0.0.
#include <algorithm>
#include <cstring>

#include "encode.hpp"
#include "receive.hpp"
#include "zensync/scheme/context.hpp"
#include "zensync/scheme/traffic.hpp"

namespace zensync {
namespace {

class RingJob {
 public:
  explicit RingJob(SchemeContext& context)
      : context_(context), work_(*context.workspace), elems_(context.spec.elems()) {}

  int size() const { return context_.size(); }

  /// Makes `ring` the sums: the rank's own values added to +0.0.
  void start() {
    const std::size_t sum_bytes = dtype_bytes(sum_dtype(context_.spec.dtype));
    work_.ring.resize_discard(elems_ * sum_bytes);
    if (elems_ != 0) std::memset(work_.ring.data(), 0, work_.ring.size());
    add(0, elems_, context_.dense_data, context_.spec.dtype);
  }

  void send(MessageKind kind, int step, int segment) {
    MessageWriter& writer = work_.pull[writer_ ^= 1];
    MessageHeader header = make_header(context_, kind, static_cast<std::size_t>(step));
    header.codec = IndexCodec::kNone;
    header.values_dtype = value_dtype(kind);
    const bool first = kind == MessageKind::kRingReduce && step == 0;
    writer.begin(*context_.kernels, header, {&context_.job, first ? std::size_t{1} : 0}, 0);
    const std::size_t bytes = dtype_bytes(header.values_dtype);
    const std::uint64_t count = end(segment) - begin(segment);
    const auto* values = kind == MessageKind::kRingReduce
                             ? work_.ring.data()
                             : static_cast<const std::byte*>(context_.dense_data);
    if (count != 0) {
      std::memcpy(writer.add_values(count * bytes), values + begin(segment) * bytes, count * bytes);
    }
    writer.set_units(static_cast<std::uint32_t>(count));
    const Rank next{(context_.rank.value + 1) % size()};
    work_.exchange.sends.push_back({next, writer.finish(context_.wire.verify)});
    const auto longest =
        longest_message(div_ceil(elems_, static_cast<std::uint64_t>(size())), 8, first);
    work_.exchange.recvs.push_back({previous(), longest, &work_.received_pull[0]});
  }

  Status receive(MessageKind kind, int step, int segment) {
    Incoming incoming;
    incoming.from = previous();
    incoming.message = work_.received_pull[0].bytes();
    incoming.expected = expect(context_, kind, static_cast<std::size_t>(step), 0);
    incoming.expected.job_headers = kind == MessageKind::kRingReduce && step == 0 ? 1 : 0;
    auto parsed = receive_message(context_, incoming);
    if (!parsed.ok()) return parsed.status();
    const ParsedMessage& message = parsed.value();
    const std::uint64_t count = end(segment) - begin(segment);
    const std::size_t bytes = dtype_bytes(value_dtype(kind));
    if (message.header.kind != kind || message.header.chunk != step ||
        message.header.sequence != context_.job.sequence ||
        message.header.job_headers != incoming.expected.job_headers) {
      return at_peer(context_, previous(),
                     make_error(ErrorKind::kMismatch, "the peer is at another place of the ring"));
    }
    if (message.header.values_dtype != value_dtype(kind) || message.header.units != count ||
        message.values.size() != count * bytes || !message.index.empty()) {
      return at_peer(
          context_, previous(),
          make_error(ErrorKind::kCorruptMessage, "a segment of another length or dtype"));
    }
    if (kind == MessageKind::kRingReduce) {
      add(begin(segment), count, message.values.data(), value_dtype(kind));
    } else if (count != 0) {
      std::memcpy(static_cast<std::byte*>(context_.dense_data) + begin(segment) * bytes,
                  message.values.data(), count * bytes);
    }
    return {};
  }

  /// Rounds the complete segment into the caller's tensor.
  void finish(int segment) {
    const DType dtype = context_.spec.dtype;
    context_.kernels->finish(
        work_.ring.data() + begin(segment) * dtype_bytes(sum_dtype(dtype)),
        static_cast<std::byte*>(context_.dense_data) + begin(segment) * dtype_bytes(dtype),
        end(segment) - begin(segment), dtype, context_.divisor());
  }

  int segment_at(int offset) const {
    const int n = size();
    return ((context_.rank.value + offset) % n + n) % n;
  }

 private:
  std::uint64_t segment_elems() const {
    return div_ceil(elems_, static_cast<std::uint64_t>(size()));
  }
  std::uint64_t begin(int segment) const {
    return std::min(elems_, segment_elems() * static_cast<std::uint64_t>(segment));
  }
  std::uint64_t end(int segment) const { return begin(segment + 1); }
  Rank previous() const { return Rank{(context_.rank.value + size() - 1) % size()}; }
  DType value_dtype(MessageKind kind) const {
    return kind == MessageKind::kRingReduce ? sum_dtype(context_.spec.dtype) : context_.spec.dtype;
  }

  void add(std::uint64_t first, std::uint64_t count, const void* values, DType dtype) {
    if (count == 0) return;
    const std::uint32_t at = 0;
    context_.kernels->add_units(
        work_.ring.data() + first * dtype_bytes(sum_dtype(context_.spec.dtype)), &at, values, 1,
        count, dtype);
  }

  SchemeContext& context_;
  Workspace& work_;
  std::uint64_t elems_;
  int writer_ = 0;
};

}  // namespace

SchemeTask dense_ring(SchemeContext& context) {
  if (context.dense_data == nullptr && context.spec.elems() != 0) {
    co_return make_error(ErrorKind::kUnsupported,
                         "dense_ring sums dense-stored tensors only; use another scheme for COO");
  }
  RingJob job(context);
  Exchange& exchange = context.workspace->exchange;
  const int n = job.size();
  job.start();
  for (int step = 0; step < n - 1; ++step) {
    exchange.clear();
    exchange.phase = "ring reduce";
    job.send(MessageKind::kRingReduce, step, job.segment_at(-step));
    co_yield &exchange;
    Status status = job.receive(MessageKind::kRingReduce, step, job.segment_at(-step - 1));
    if (!status.ok()) co_return status;
  }
  job.finish(job.segment_at(1));
  for (int step = 0; step < n - 1; ++step) {
    exchange.clear();
    exchange.phase = "ring gather";
    job.send(MessageKind::kRingGather, step, job.segment_at(1 - step));
    co_yield &exchange;
    Status status = job.receive(MessageKind::kRingGather, step, job.segment_at(-step));
    if (!status.ok()) co_return status;
  }
  co_return Status();
}

std::vector<RankTraffic> dense_ring_traffic(const TrafficInput& input) {
  const auto n = static_cast<std::uint64_t>(input.size);
  std::vector<RankTraffic> ranks(n);
  const std::uint64_t elems = input.spec.elems();
  const std::uint64_t segment = div_ceil(elems, n);
  const auto length = [&](std::uint64_t s) {
    return std::min(elems, segment * (s + 1)) - std::min(elems, segment * s);
  };
  for (std::uint64_t rank = 0; rank < n; ++rank) {
    const auto from = static_cast<int>(rank);
    const auto to = static_cast<int>((rank + 1) % n);
    for (std::uint64_t step = 0; step + 1 < n; ++step) {
      const std::uint64_t reduced = length((rank + n - step) % n);
      const std::uint64_t gathered = length((rank + 1 + n - step) % n);
      book(ranks, from, to,
           message_bytes(step == 0, reduced, dtype_bytes(sum_dtype(input.spec.dtype)), 0));
      book(ranks, from, to, message_bytes(0, gathered, dtype_bytes(input.spec.dtype), 0));
    }
  }
  return ranks;
}

}  // namespace zensync
