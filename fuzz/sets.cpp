// Properties of sets and makers of them. Place: fuzz. The walk is the obvious one, from the words
// of sparse_set.hpp; it shares nothing with the codec.
#include "sets.hpp"

#include <algorithm>

#include "zensync/base/hash.hpp"

namespace zensync::fuzz {
namespace {

constexpr std::uint64_t kBlock = 16384;

}  // namespace

void require_sound(const SparseSet& set, std::uint64_t slots, std::uint64_t units) {
  std::uint64_t next_block = 0;
  std::uint64_t next_begin = 0;
  for (const BlockRun& run : set.runs) {
    require(run.block >= next_block, "blocks ascend");
    require(run.begin == next_begin, "runs follow one another");
    require(run.count != 0, "no run is empty");
    require(run.begin + std::uint64_t{run.count} <= set.offsets.size(), "offsets are there");
    next_block = run.block + 1;
    next_begin += run.count;
    for (std::uint32_t i = run.begin; i < run.begin + run.count; ++i) {
      require(i == run.begin || set.offsets[i] > set.offsets[i - 1], "offsets ascend");
      require(set.offsets[i] < kBlock, "an offset lies in its block");
      require(run.block < slots / kBlock + 1, "a block lies in range");
      require(run.block * kBlock + set.offsets[i] < slots, "a slot lies in range");
    }
  }
  require(next_begin == units, "as many units as stated");
  require(set.units() == units, "the set counts them too");
}

bool same_slots(const SparseSet& a, const SparseSet& b) {
  if (a.runs.size() != b.runs.size()) return false;
  for (std::size_t i = 0; i < a.runs.size(); ++i) {
    const BlockRun& x = a.runs[i];
    const BlockRun& y = b.runs[i];
    if (x.block != y.block || x.begin != y.begin || x.count != y.count) return false;
    const auto* from = a.offsets.data() + x.begin;
    if (!std::equal(from, from + x.count, b.offsets.data() + y.begin)) return false;
  }
  return true;
}

std::uint64_t choose_slots(std::uint8_t choice) {
  constexpr std::uint64_t kSlots[kSlotChoices] = {1,
                                                  203,
                                                  kBlock,
                                                  kBlock + 1,
                                                  5 * kBlock + 77,
                                                  (1ULL << 32) + 1,
                                                  (1ULL << 33) + 9,
                                                  (1ULL << 48) - 1};
  return kSlots[choice % kSlotChoices];
}

std::vector<std::uint64_t> some_slots(std::uint64_t slots, std::uint64_t units,
                                      std::uint64_t seed) {
  std::vector<std::uint64_t> found;
  for (std::uint64_t i = 0; i < units; ++i) found.push_back(mix64(seed * 1000 + i) % slots);
  found.push_back(slots - 1);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

void fill_set(const std::vector<std::uint64_t>& found, SparseSet& set) {
  set.clear();
  set.offsets.resize_discard(found.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    const std::uint64_t block = found[i] / kBlock;
    if (set.runs.empty() || set.runs.back().block != block) {
      set.runs.push_back({block, static_cast<std::uint32_t>(i), 0});
    }
    ++set.runs.back().count;
    set.offsets[i] = static_cast<std::uint16_t>(found[i] % kBlock);
  }
}

}  // namespace zensync::fuzz
