// How many bytes a scheme sends, from counts alone.
// Place: scheme, level 3. From exact counts (ExactCounts) the result equals, byte for byte, what
// passes a counting driver: message headers, job headers and frame prefixes included. Tests hold
// schemes against it, and the planner's estimate, which has closed forms of its own
// (plan/src/estimate.cpp).
// Owner: inputs are the caller's; results are values. ExactCounts owns its lists and a cache.
// Threads: pure but for that cache: one ExactCounts per thread. Fails with std::bad_alloc only.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "zensync/base/plan.hpp"
#include "zensync/partition/partition.hpp"
#include "zensync/scheme/context.hpp"

namespace zensync {

/// Slots [begin, end) of one owner.
struct SlotRange {
  const Partition* partition = nullptr;
  Rank owner;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// Says how many units there are.
class UnitCounts {
 public:
  virtual ~UnitCounts() = default;
  /// Units of `range` that are non-zero on at least one of `ranks` (ascending).
  virtual std::uint64_t units(std::span<const int> ranks, const SlotRange& range) const = 0;
};

/// Exact counts, from each rank's ascending units.
class ExactCounts : public UnitCounts {
 public:
  explicit ExactCounts(std::vector<std::vector<UnitId>> units_of_rank);
  std::uint64_t units(std::span<const int> ranks, const SlotRange& range) const override;

 private:
  using CacheKey = std::pair<std::vector<int>, Partition>;
  const std::vector<std::uint64_t>& slots(std::span<const int> ranks, const SlotRange& range) const;
  std::vector<std::vector<UnitId>> units_of_rank_;
  mutable std::map<CacheKey, std::vector<std::vector<std::uint64_t>>> cache_;
};

struct TrafficInput {
  int size = 0;
  TensorSpec spec;
  Plan plan;
  WireOptions wire;
  std::uint64_t key = 0;
  const UnitCounts* counts = nullptr;
  /// By rank: COO whose entries do not ascend. They are added up before they are sent, so a rank's
  /// own units carry sum_dtype. Empty: none.
  std::vector<bool> coalesced;
  std::uint64_t units() const { return spec.elems() / plan.width; }
  std::uint64_t unit_bytes() const { return plan.width * dtype_bytes(spec.dtype); }
  std::uint64_t sum_bytes() const { return plan.width * dtype_bytes(sum_dtype(spec.dtype)); }
  /// Of a unit in a message with units of `rank` alone.
  std::uint64_t own_bytes(int rank) const {
    const bool is_sum = !coalesced.empty() && coalesced[static_cast<std::size_t>(rank)];
    return is_sum ? sum_bytes() : unit_bytes();
  }
};

/// Bytes of one rank; wire bytes are the larger of both.
struct RankTraffic {
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
};

/// Per rank. `kAuto` and `kDense` give zeros (nothing of ours is sent).
std::vector<RankTraffic> traffic(const TrafficInput& input);

std::vector<RankTraffic> balanced_traffic(const TrafficInput& input);
std::vector<RankTraffic> recursive_doubling_traffic(const TrafficInput& input);
std::vector<RankTraffic> agsparse_traffic(const TrafficInput& input);
std::vector<RankTraffic> dense_ring_traffic(const TrafficInput& input);

/// Units and index bytes of a message with the units of `ranks` in `range`.
struct IndexTraffic {
  std::uint64_t units = 0;
  std::uint64_t bytes = 0;
};
IndexTraffic index_traffic(const TrafficInput& input, std::span<const int> ranks,
                           const SlotRange& range);

/// Books a message of `bytes` (prefix excluded) from `from` to `to`.
void book(std::vector<RankTraffic>& ranks, int from, int to, std::uint64_t bytes);

}  // namespace zensync
