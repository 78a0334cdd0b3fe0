// Parts of a sum, one for each rank, as a reduce-scatter must leave them. Place: tests/support.
// A plain loop over elements; shares nothing with the partition.
// Outputs own their memory and must outlive the jobs that write to it.
#pragma once

#include <vector>

#include "cases.hpp"

namespace zensync::test {

using Memory = std::vector<std::byte>;

/// The part of `rank` of a dense-stored tensor of the case's shape.
inline Memory shard_of(const CaseSpec& spec, std::span<const std::byte> whole, int rank,
                       ShardLayout layout) {
  const auto n = static_cast<std::uint64_t>(spec.size);
  const std::uint64_t most = (spec.rows + n - 1) / n;
  const std::size_t bytes = dtype_bytes(spec.dtype);
  Memory part;
  for (std::uint64_t i = 0; i < spec.rows * spec.row_elems; ++i) {
    const std::uint64_t owner = layout == ShardLayout::kRows
                                    ? i / spec.row_elems / most
                                    : i % spec.row_elems / (spec.row_elems / n);
    if (owner != static_cast<std::uint64_t>(rank)) continue;
    part.insert(part.end(), whole.begin() + static_cast<std::ptrdiff_t>(i * bytes),
                whole.begin() + static_cast<std::ptrdiff_t>((i + 1) * bytes));
  }
  return part;
}

/// What each rank's output holds before, between two bytes that must stay.
struct ShardOutputs {
  static constexpr std::byte kBefore{0xAB};
  ShardOutputs(const CaseSpec& of, ShardLayout by) : spec(of), layout(by) {
    const Memory nothing(spec.rows * spec.row_elems * dtype_bytes(spec.dtype));
    for (int rank = 0; rank < spec.size; ++rank) {
      memory.emplace_back(shard_of(spec, nothing, rank, layout).size() + 2 * kFence, kBefore);
    }
  }
  static constexpr std::size_t kFence = 16;
  /// `job` as a reduce-scatter into the output of `rank`.
  JobSpec into(JobSpec job, int rank) {
    job.shard = ShardView{layout, memory[static_cast<std::size_t>(rank)].data() + kFence};
    return job;
  }
  std::span<const std::byte> of(int rank) const {
    const Memory& all = memory[static_cast<std::size_t>(rank)];
    return std::span(all).subspan(kFence, all.size() - 2 * kFence);
  }
  bool is_untouched(int rank) const {
    const Memory& all = memory[static_cast<std::size_t>(rank)];
    return all == Memory(all.size(), kBefore);
  }
  bool is_fenced(int rank) const {
    const Memory& all = memory[static_cast<std::size_t>(rank)];
    const Memory fence(kFence, kBefore);
    return std::equal(fence.begin(), fence.end(), all.begin()) &&
           std::equal(fence.begin(), fence.end(), all.end() - kFence);
  }
  CaseSpec spec;
  ShardLayout layout;
  std::vector<Memory> memory;
};

/// Whether `rank`, whose job has ended, has its part of `sum`, bit for bit, and nothing beside it.
inline ::testing::AssertionResult holds_shard(const ShardOutputs& outputs, int rank,
                                              const Job& done, const Sum& sum) {
  if (!done.status().ok()) {
    return ::testing::AssertionFailure()
           << "rank " << rank << ": " << done.status().error().message;
  }
  if (!outputs.is_fenced(rank)) return ::testing::AssertionFailure() << "written beside the output";
  return same_bytes(shard_of(outputs.spec, sum.dense, rank, outputs.layout), outputs.of(rank),
                    outputs.spec.dtype);
}

}  // namespace zensync::test
