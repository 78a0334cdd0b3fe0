// Implementation of the adder; see set_adder.hpp. Place: scheme, level 3.
// Owns its scratch; cannot fail (but for std::bad_alloc).
#include "zensync/scheme/set_adder.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace zensync {

void SetAdder::unite_block(std::span<const SparseSet* const> sets, std::uint64_t block,
                           SparseSet& out) {
  std::uint32_t total = 0;
  for (std::size_t s = 0; s < sets.size(); ++s) {
    const SparseSet& set = *sets[s];
    if (cursors_[s] >= set.runs.size() || set.runs[cursors_[s]].block != block) continue;
    const BlockRun& run = set.runs[cursors_[s]];
    const std::uint16_t* offsets = set.offsets.data() + run.begin;
    for (std::uint32_t i = 0; i < run.count; ++i) {
      words_[offsets[i] / 64] |= 1ULL << (offsets[i] % 64);
    }
    total += run.count;
  }
  const std::uint32_t begin = out.units();
  const std::uint32_t most = std::min(total, kernels::kBlockSlots);
  out.offsets.resize_keep(begin + most);
  std::uint32_t next = begin;
  for (std::size_t w = 0; w < kWords; ++w) {
    for (std::uint64_t word = words_[w]; word != 0; word &= word - 1) {
      const auto offset =
          static_cast<std::uint32_t>(w * 64) + static_cast<std::uint32_t>(std::countr_zero(word));
      out.offsets[next] = static_cast<std::uint16_t>(offset);
      places_[offset] = next++;
    }
    words_[w] = 0;
  }
  out.runs.push_back({block, begin, next - begin});
}

void SetAdder::add_block(const kernels::Table& table, std::span<const SparseSet* const> sets,
                         std::uint64_t width, SparseSet& out) {
  const BlockRun& sum_run = out.runs.back();
  const std::size_t sum_bytes = width * dtype_bytes(out.values_dtype);
  const std::size_t begin_bytes = sum_run.begin * sum_bytes;
  out.storage.resize_keep(begin_bytes + sum_run.count * sum_bytes);
  std::memset(out.storage.data() + begin_bytes, 0, sum_run.count * sum_bytes);
  for (std::size_t s = 0; s < sets.size(); ++s) {
    const SparseSet& set = *sets[s];
    if (cursors_[s] >= set.runs.size() || set.runs[cursors_[s]].block != sum_run.block) continue;
    const BlockRun& run = set.runs[cursors_[s]++];
    const std::uint16_t* offsets = set.offsets.data() + run.begin;
    for (std::uint32_t i = 0; i < run.count; ++i) at_[i] = places_[offsets[i]];
    const auto* values = static_cast<const std::byte*>(set.values) +
                         run.begin * width * dtype_bytes(set.values_dtype);
    table.add_units(out.storage.data(), at_.data(), values, run.count, width, set.values_dtype);
  }
}

void SetAdder::add(const kernels::Table& table, std::span<const SparseSet* const> sets,
                   std::uint64_t width, DType dtype, SparseSet& out) {
  out.clear();
  out.values_dtype = sum_dtype(dtype);
  places_.resize_discard(kernels::kBlockSlots);
  at_.resize_discard(kernels::kBlockSlots);
  cursors_.assign(sets.size(), 0);
  for (;;) {
    std::uint64_t block = std::numeric_limits<std::uint64_t>::max();
    for (std::size_t s = 0; s < sets.size(); ++s) {
      if (cursors_[s] < sets[s]->runs.size()) {
        block = std::min(block, sets[s]->runs[cursors_[s]].block);
      }
    }
    if (block == std::numeric_limits<std::uint64_t>::max()) break;
    unite_block(sets, block, out);
    add_block(table, sets, width, out);
  }
  out.offsets.resize_keep(out.units());
  out.values = out.storage.data();
}

}  // namespace zensync
