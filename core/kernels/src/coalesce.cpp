// Sorts COO entries by row and adds up those of one row in the order in which they are stored.
// Place: kernels. The ids are sorted (least significant digit first, stable, only as many digits as
// the largest row has); the values are not moved: each entry learns the place of its row among the
// distinct ones, then `add_units` runs over the values once, in memory order. Ids that ascend
// already skip the sort. Scratch is the caller's and grows to 36 bytes an entry at most. entries ≤
// 2^32 − 1, indices ≥ 0. Throws std::bad_alloc only, from the buffers.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "zensync/kernels/kernels.hpp"

namespace zensync::kernels {
namespace {

/// A row and where it was stored, in one word: rows below 2^32.
struct ShortEntry {
  std::uint64_t word;
  static ShortEntry make(std::uint64_t row, std::uint32_t position) {
    return {row << 32 | position};
  }
  std::uint64_t row() const { return word >> 32; }
  std::uint32_t position() const { return static_cast<std::uint32_t>(word); }
};

/// The same for any row.
struct LongEntry {
  std::uint64_t full_row;
  std::uint64_t place;
  static LongEntry make(std::uint64_t row, std::uint32_t position) { return {row, position}; }
  std::uint64_t row() const { return full_row; }
  std::uint32_t position() const { return static_cast<std::uint32_t>(place); }
};

/// 8 KiB of counters and 2048 write streams still fit L1 and L2; with few entries, clearing so many
/// counters would cost the most.
constexpr unsigned kMaxDigitBits = 11;
constexpr unsigned kFewDigitBits = 8;
constexpr std::size_t kFewEntries = 1024;

/// One stable pass by the digit of `digit_bits` bits at `shift`. False, with nothing moved, if all
/// entries have the same digit.
template <class Entry>
bool sort_by_digit(const Entry* from, Entry* to, std::size_t count, unsigned shift,
                   unsigned digit_bits) {
  std::uint32_t starts[1U << kMaxDigitBits];
  const std::size_t buckets = std::size_t{1} << digit_bits;
  const std::uint64_t mask = buckets - 1;
  std::fill(starts, starts + buckets, 0U);
  for (std::size_t i = 0; i < count; ++i) ++starts[from[i].row() >> shift & mask];
  if (starts[from[0].row() >> shift & mask] == count) return false;
  std::uint32_t start = 0;
  for (std::size_t b = 0; b < buckets; ++b) start += std::exchange(starts[b], start);
  for (std::size_t i = 0; i < count; ++i) to[starts[from[i].row() >> shift & mask]++] = from[i];
  return true;
}

/// Sorts by row, stably, with `spare` as a second array; returns the array that holds the result.
template <class Entry>
Entry* sort_entries(Entry* entries, Entry* spare, std::size_t count, std::uint64_t max_row) {
  const unsigned row_bits = std::max(1U, static_cast<unsigned>(std::bit_width(max_row)));
  const unsigned most_bits = count < kFewEntries ? kFewDigitBits : kMaxDigitBits;
  const unsigned passes = static_cast<unsigned>(div_ceil(row_bits, most_bits));
  const unsigned digit_bits = static_cast<unsigned>(div_ceil(row_bits, passes));
  for (unsigned pass = 0; pass < passes; ++pass) {
    if (sort_by_digit(entries, spare, count, pass * digit_bits, digit_bits)) {
      std::swap(entries, spare);
    }
  }
  return entries;
}

/// Writes the distinct rows, ascending, and for each entry the place of its row among them.
template <class Entry>
std::size_t rank_by_sorting(std::span<const std::int64_t> indices, std::uint64_t max_row,
                            CoalesceScratch& scratch, std::uint64_t* rows) {
  const std::size_t count = indices.size();
  scratch.keys.resize_discard(count * sizeof(Entry));
  scratch.spare.resize_discard(count * sizeof(Entry));
  auto* entries = scratch.keys.as<Entry>();
  for (std::size_t i = 0; i < count; ++i) {
    entries[i] = Entry::make(static_cast<std::uint64_t>(indices[i]), static_cast<std::uint32_t>(i));
  }
  const Entry* sorted = sort_entries(entries, scratch.spare.as<Entry>(), count, max_row);
  auto* places = scratch.order.as<std::uint32_t>();
  std::size_t distinct = 0;
  for (std::size_t i = 0; i < count; ++i) {
    distinct += i == 0 || sorted[i].row() != sorted[i - 1].row() ? 1 : 0;
    rows[distinct - 1] = sorted[i].row();
    places[sorted[i].position()] = static_cast<std::uint32_t>(distinct - 1);
  }
  return distinct;
}

/// The same for indices that ascend already.
std::size_t rank_in_order(std::span<const std::int64_t> indices, std::uint32_t* places,
                          std::uint64_t* rows) {
  std::size_t distinct = 0;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    distinct += i == 0 || indices[i] != indices[i - 1] ? 1 : 0;
    rows[distinct - 1] = static_cast<std::uint64_t>(indices[i]);
    places[i] = static_cast<std::uint32_t>(distinct - 1);
  }
  return distinct;
}

}  // namespace

bool coalesce(const Table& table, const CooEntries& entries, CoalesceScratch& scratch,
              Array<std::uint64_t>& rows_out, Buffer& sums_out) {
  const std::span<const std::int64_t> indices = entries.rows;
  const std::size_t row_elems = entries.row_elems;
  const std::size_t count = indices.size();
  rows_out.resize_discard(count);
  scratch.order.resize_discard(count * sizeof(std::uint32_t));
  bool ascends = true;
  std::uint64_t max_row = 0;
  for (std::size_t i = 0; i < count; ++i) {
    ascends &= i == 0 || indices[i] >= indices[i - 1];
    max_row = std::max(max_row, static_cast<std::uint64_t>(indices[i]));
  }
  auto* places = scratch.order.as<std::uint32_t>();
  std::size_t distinct = 0;
  if (ascends) {
    distinct = rank_in_order(indices, places, rows_out.data());
  } else if (max_row >> 32 == 0) {
    distinct = rank_by_sorting<ShortEntry>(indices, max_row, scratch, rows_out.data());
  } else {
    distinct = rank_by_sorting<LongEntry>(indices, max_row, scratch, rows_out.data());
  }
  rows_out.resize_keep(distinct);
  sums_out.resize_discard(distinct * row_elems * dtype_bytes(sum_dtype(entries.dtype)));
  if (sums_out.size() != 0) {
    std::memset(sums_out.data(), 0, sums_out.size());
    table.add_units(sums_out.data(), places, entries.values, count, row_elems, entries.dtype);
  }
  return distinct != count;
}

}  // namespace zensync::kernels
