// The push-only half of a synchronisation, for owners that are given: a sparse reduce-scatter.
// Place: scheme, level 3; for sharded optimisers, where a rank needs its own part of the sum only.
// Shapes: a dense-stored tensor of rows × row_elems; each rank gets the sum of its shard:
//   kRows     rank r owns rows [r·⌈V/n⌉, (r+1)·⌈V/n⌉); the last shards may be short or empty.
//             Units are rows.
//   kColumns  rank r owns elements [r·D/n, (r+1)·D/n) of each row. Units are parts of rows.
// Owner: input and output are the caller's, do not overlap and outlive the coroutine. The search
// writes +0.0 over −0.0 in the input, else it stays as it is.
// Threads: as for every scheme (context.hpp). Fails with kUnsupported or kCapacity before anything
// is sent, with kCorruptMessage or kMismatch afterwards; std::bad_alloc passes.
#pragma once

#include <cstdint>
#include <vector>

#include "zensync/base/result.hpp"
#include "zensync/scheme/context.hpp"
#include "zensync/scheme/traffic.hpp"

namespace zensync {

enum class ShardLayout : std::uint8_t { kRows = 0, kColumns = 1 };

/// Units that one rank sent to each owner and received from each peer (its own included).
struct ShardCounts {
  std::vector<std::uint64_t> sent_units;
  std::vector<std::uint64_t> received_units;
  std::uint64_t largest_units = 0;  ///< of the whole tensor, on the rank that has most; all know it
  std::uint64_t shard_units = 0;    ///< of this rank's shard, that some rank sent
  /// Largest / mean over owners of `sent_units`; 1 where there are none.
  double imbalance() const;
};

struct ShardTarget {
  ShardLayout layout = ShardLayout::kRows;
  void* output = nullptr;         ///< shard_elems() elements, all of them written
  ShardCounts* counts = nullptr;  ///< filled when the job ends well
};

/// Elements per unit. Errors: kUnsupported (rows that n does not divide into equal parts, or COO),
/// kCapacity (more than 2^32 − 1 units, the most that one message counts).
Result<std::uint64_t> shard_width(const TensorSpec& spec, int size, ShardLayout layout);

/// Elements of the shard of `rank`; `spec` is one that shard_width takes.
std::uint64_t shard_elems(const TensorSpec& spec, int size, Rank rank, ShardLayout layout);

/// Every rank sends each owner its non-zero units; the owner adds them in rank order, from +0.0.
/// `context.plan.width` is shard_width(…); `context.sink` and `context.counts` are not used, and
/// `context.wire.partition` says nothing here. The job header's plan digest covers the layout by
/// way of the width.
SchemeTask reduce_scatter(SchemeContext& context, ShardTarget target);

/// Per rank. `input.plan.width` as above.
std::vector<RankTraffic> reduce_scatter_traffic(const TrafficInput& input, ShardLayout layout);

}  // namespace zensync
