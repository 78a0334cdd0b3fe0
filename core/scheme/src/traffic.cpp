// What all schemes' traffic share: exact counts, the cost of an index, the book. Place: scheme,
// level 3. Pure, but for the cache of ExactCounts.
#include "zensync/scheme/traffic.hpp"

#include <algorithm>

namespace zensync {

ExactCounts::ExactCounts(std::vector<std::vector<UnitId>> units_of_rank)
    : units_of_rank_(std::move(units_of_rank)) {}

const std::vector<std::uint64_t>& ExactCounts::slots(std::span<const int> ranks,
                                                     const SlotRange& range) const {
  const CacheKey key{{ranks.begin(), ranks.end()}, *range.partition};
  auto [it, fresh] = cache_.try_emplace(key);
  if (fresh) {
    std::vector<UnitId> united;
    for (int rank : ranks) {
      const auto& units = units_of_rank_[static_cast<std::size_t>(rank)];
      united.insert(united.end(), units.begin(), units.end());
    }
    std::sort(united.begin(), united.end());
    united.erase(std::unique(united.begin(), united.end()), united.end());
    it->second.resize(static_cast<std::size_t>(range.partition->owners()));
    for (UnitId unit : united) {
      const auto owner = static_cast<std::size_t>(range.partition->owner_of(unit).value);
      it->second[owner].push_back(range.partition->slot_of(unit));
    }
  }
  return it->second[static_cast<std::size_t>(range.owner.value)];
}

std::uint64_t ExactCounts::units(std::span<const int> ranks, const SlotRange& range) const {
  const auto& all = slots(ranks, range);
  const auto begin = std::lower_bound(all.begin(), all.end(), range.begin);
  return static_cast<std::uint64_t>(std::lower_bound(begin, all.end(), range.end) - begin);
}

IndexTraffic index_traffic(const TrafficInput& input, std::span<const int> ranks,
                           const SlotRange& range) {
  IndexTraffic result;
  const std::uint64_t slots = range.end - range.begin;
  std::uint64_t skipped = 0;
  for (std::uint64_t block = 0; block < div_ceil(slots, kernels::kBlockSlots); ++block) {
    SlotRange part = range;
    part.begin = range.begin + block * kernels::kBlockSlots;
    part.end = part.begin + slots_of_block(block, slots);
    const std::uint64_t count = input.counts->units(ranks, part);
    if (count == 0) {
      ++skipped;
      continue;
    }
    result.bytes += block_bytes(input.wire.codec, skipped, static_cast<std::uint32_t>(count),
                                slots_of_block(block, slots));
    result.units += count;
    skipped = 0;
  }
  result.bytes = choose_index(input.wire.codec, result.units, slots, result.bytes).bytes;
  return result;
}

void book(std::vector<RankTraffic>& ranks, int from, int to, std::uint64_t bytes) {
  ranks[static_cast<std::size_t>(from)].sent_bytes += bytes + kFramePrefixBytes;
  ranks[static_cast<std::size_t>(to)].received_bytes += bytes + kFramePrefixBytes;
}

std::vector<RankTraffic> traffic(const TrafficInput& input) {
  switch (input.plan.scheme) {
    case SchemeId::kBalanced:
      return balanced_traffic(input);
    case SchemeId::kRecursiveDoubling:
      return recursive_doubling_traffic(input);
    case SchemeId::kAgSparse:
      return agsparse_traffic(input);
    case SchemeId::kDenseRing:
      return dense_ring_traffic(input);
    case SchemeId::kAuto:
    case SchemeId::kDense:
      break;
  }
  return std::vector<RankTraffic>(static_cast<std::size_t>(input.size));
}

}  // namespace zensync
