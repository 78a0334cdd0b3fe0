// Timing of local work; see kernel_timing.hpp. Place: bench, level 6.
// Sees the internals of scheme, so that what is timed is what a job runs.
#include "kernel_timing.hpp"

#include <chrono>
#include <cstring>

#include "encode.hpp"
#include "receive.hpp"
#include "zensync/base/hash.hpp"
#include "zensync/scheme/context.hpp"

namespace zensync {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Everything that encoding needs, as a job of rank 0 would have it.
class EncodeBench {
 public:
  EncodeBench(std::span<float> tensor, int ranks, std::uint64_t chunks)
      : workspace_(ranks),
        topology_(flat_topology(ranks)),
        partition_(PartitionKind::kRotation, tensor.size(), ranks, key_of("bench")),
        source_(UnitSource::scanned(tensor.data(), 1, DType::kF32)),
        sink_() {
    context_.kernels = &kernels::active();
    context_.rank = Rank{0};
    context_.topology = &topology_;
    context_.spec = {tensor.size(), 1, DType::kF32, Layout::kDense};
    context_.source = &source_;
    context_.workspace = &workspace_;
    for (std::uint64_t chunk = 1; chunk <= chunks; ++chunk) {
      context_.plan.chunk_ends.push_back(partition_.slots() * chunk / chunks);
    }
  }

  void encode() {
    MessageHeader totals;
    std::uint64_t begin = 0;
    for (std::size_t chunk = 0; chunk < context_.plan.chunk_ends.size(); ++chunk) {
      const std::uint64_t end = context_.plan.chunk_ends[chunk];
      auto& writers = workspace_.push[chunk % 2];
      for (MessageWriter& writer : writers) {
        writer.begin(*context_.kernels, make_header(context_, MessageKind::kPush, chunk), {},
                     end - begin);
      }
      encode_range(context_, {&partition_, &workspace_.split_owners, begin, end}, writers, totals);
      for (MessageWriter& writer : writers) writer.finish(true);
      begin = end;
    }
  }

  /// Reads the messages of the last chunk and writes their values back.
  bool write_back(float* data) {
    sink_.start_dense(data, sizeof(float));
    for (int owner = 0; owner < context_.size(); ++owner) {
      const Expected expected = expect(context_, MessageKind::kPush, 0, partition_.slots());
      auto parsed = parse_message(
          std::as_const(workspace_.push[0][static_cast<std::size_t>(owner)]).bytes(), expected);
      if (!parsed.ok()) return false;
      SparseSet& set = workspace_.sets[static_cast<std::size_t>(owner)];
      if (!read_set(*context_.kernels, parsed.value(), expected, set).ok()) return false;
      sink_.put(*context_.kernels, {&partition_, Rank{owner}, 0}, set);
    }
    return true;
  }

 private:
  Workspace workspace_;
  Topology topology_;
  Partition partition_;
  UnitSource source_;
  UnitSink sink_;
  SchemeContext context_;
};

/// Alternates `ours` and a memcpy of `tensor`, after one untimed round.
template <class Ours>
std::vector<TimedPair> alternate(std::span<const float> tensor, int iterations, Ours ours) {
  Buffer copy;
  copy.resize_discard(tensor.size_bytes());
  std::vector<TimedPair> pairs;
  for (int i = -1; i < iterations; ++i) {
    TimedPair pair;
    auto start = Clock::now();
    ours();
    pair.ours_s = seconds_since(start);
    start = Clock::now();
    std::memcpy(copy.data(), tensor.data(), tensor.size_bytes());
    asm volatile("" ::"r"(copy.data()) : "memory");
    pair.copy_s = seconds_since(start);
    if (i >= 0) pairs.push_back(pair);
  }
  return pairs;
}

}  // namespace

std::vector<TimedPair> time_encode(std::span<float> tensor, int ranks, int iterations) {
  EncodeBench bench(tensor, ranks, 8);
  return alternate(tensor, iterations, [&] { bench.encode(); });
}

std::vector<TimedPair> time_write_back(std::span<float> tensor, int ranks, int iterations) {
  EncodeBench bench(tensor, ranks, 1);
  bench.encode();
  return alternate(tensor, iterations, [&] { bench.write_back(tensor.data()); });
}

std::vector<TimedPair> time_find_rows(std::span<float> tensor, std::uint64_t row_elems,
                                      int iterations) {
  const kernels::Table& table = kernels::active();
  const std::size_t rows = tensor.size() / row_elems;
  Array<std::uint32_t> found;
  found.resize_discard(rows + kernels::kSlackElems);
  return alternate(tensor, iterations, [&] {
    table.find_units(tensor.data(), rows, row_elems, DType::kF32, found.data());
  });
}

double time_coalesce(std::span<const std::int64_t> indices, const float* values,
                     std::uint64_t row_elems) {
  static thread_local kernels::CoalesceScratch scratch;
  static thread_local Array<std::uint64_t> rows;
  static thread_local Buffer sums;
  const auto start = Clock::now();
  kernels::coalesce(kernels::active(), {indices, values, row_elems, DType::kF32}, scratch, rows,
                    sums);
  return seconds_since(start);
}

}  // namespace zensync
