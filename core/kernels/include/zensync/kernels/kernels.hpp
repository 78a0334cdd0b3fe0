// The loops over elements: find, count, add, finish, gather, scatter, pack, unpack, coalesce.
// Place: kernels, level 1. One table of functions per target; `ref` is the obvious version and the
// oracle, the others are SIMD (Google Highway) and give the same bits.
// Owner: all memory is the caller's. Nothing here allocates (but `coalesce`, in the scratch handed
// to it: std::bad_alloc), blocks or fails, except where a result says so. Lengths and positions are
// trusted; only `unpack_*` take bytes from elsewhere.
// Threads: any thread may call any function on memory that no one else writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "zensync/base/buffer.hpp"
#include "zensync/base/result.hpp"
#include "zensync/base/types.hpp"

namespace zensync::kernels {

/// Slots of one block at most; offsets in a block are 16-bit.
inline constexpr std::uint32_t kBlockSlots = 16384;
/// Output arrays of `find_units`, `unpack_*` are this many elements longer than what they hold.
inline constexpr std::size_t kSlackElems = 64;

/// Scratch of `coalesce`, kept by the caller so that repeated calls do not allocate.
struct CoalesceScratch {
  Buffer keys;
  Buffer order;
  Buffer spare;
};

struct Table {
  std::string_view name;  ///< "ref", "avx2", "avx3", "neon", …

  /// Writes the ascending indices of the non-zero units among `units` units of `width` elements at
  /// `data` to `out` (room for units + kSlackElems) and returns their number. units ≤ 2^32 − 1.
  /// Floats: a unit is non-zero if any element has a bit set besides its sign; each −0.0 met is
  /// replaced by +0.0 in place. Integers: if any element is not 0. An integer test: DAZ has no say.
  std::size_t (*find_units)(void* data, std::size_t units, std::size_t width, DType dtype,
                            std::uint32_t* out);

  /// Number of elements that are non-zero in the sense of `find_units`; writes nothing.
  std::uint64_t (*count_nonzero)(const void* data, std::size_t elems, DType dtype);

  /// sums[at[i] × width + j] += widen(values[i × width + j]) for i < count, in order of i.
  /// `sums` has sum_dtype(values_dtype); `at` may hold a position more than once. Integers wrap.
  /// The accumulator is the left operand of the addition (NaN payloads).
  void (*add_units)(void* sums, const std::uint32_t* at, const void* values, std::size_t count,
                    std::size_t width, DType values_dtype);

  /// out[i] = round(sums[i] / divisor) for i < elems; `sums` has sum_dtype(out_dtype). divisor 1:
  /// only rounds (copies). Integers: divisor is 1. Round to nearest, ties to even; NaN stays NaN
  /// (quiet, its top payload bits kept). `out` may be `sums` when the types are equal.
  void (*finish)(const void* sums, void* out, std::size_t elems, DType out_dtype, double divisor);

  /// out[i] = unit at[i] of `base`, i < count; units of unit_bytes bytes (2, 4, 8, or any multiple
  /// of 2).
  void (*gather)(const void* base, const std::uint32_t* at, std::size_t count,
                 std::size_t unit_bytes, void* out);
  /// Unit at[i] of `base` = in[i], i < count.
  void (*scatter)(void* base, const std::uint32_t* at, std::size_t count, std::size_t unit_bytes,
                  const void* in);

  /// Bitmap of `slots` (≤ kBlockSlots) bits, LSB first, ⌈slots/8⌉ bytes, padding bits 0; `offsets`
  /// ascend strictly, < slots. Writes exactly bitmap_bytes(slots) bytes.
  void (*pack_bitmap)(const std::uint16_t* offsets, std::uint32_t count, std::uint32_t slots,
                      std::byte* out);
  /// The reverse: writes offsets (room for count + kSlackElems), returns false unless exactly
  /// `count` bits are set and the padding bits are 0.
  bool (*unpack_bitmap)(const std::byte* in, std::uint32_t count, std::uint32_t slots,
                        std::uint16_t* offsets);

  /// Elias–Fano of count ≥ 1 offsets of `slots` (ascending strictly). l =
  /// elias_fano_low_bits(count, slots). First ⌈(count + ⌈slots/2^l⌉)/8⌉ bytes of upper bits: bit
  /// (offsets[i] >> l) + i is set; then ⌈count·l/8⌉ bytes of lower bits, l each, LSB first,
  /// contiguous. Padding bits 0. Writes exactly elias_fano_bytes(count, slots) bytes.
  void (*pack_elias_fano)(const std::uint16_t* offsets, std::uint32_t count, std::uint32_t slots,
                          std::byte* out);
  /// The reverse; returns false unless the bytes hold exactly `count` strictly ascending offsets <
  /// slots with padding 0. Never reads past elias_fano_bytes(count, slots).
  bool (*unpack_elias_fano)(const std::byte* in, std::uint32_t count, std::uint32_t slots,
                            std::uint16_t* offsets);
};

constexpr std::size_t bitmap_bytes(std::uint32_t slots) { return (slots + 7) / 8; }

/// ⌊log2(slots / count)⌋; 0 if count > slots/2.
constexpr unsigned elias_fano_low_bits(std::uint32_t count, std::uint32_t slots) {
  unsigned bits = 0;
  while ((static_cast<std::uint64_t>(count) << (bits + 1)) <= slots) ++bits;
  return bits;
}

constexpr std::size_t elias_fano_bytes(std::uint32_t count, std::uint32_t slots) {
  const unsigned low_bits = elias_fano_low_bits(count, slots);
  const std::uint32_t buckets = (slots + (1U << low_bits) - 1) >> low_bits;
  return (count + buckets + 7) / 8 + (static_cast<std::size_t>(count) * low_bits + 7) / 8;
}

/// The kernels in use: those of ZENSYNC_CPU_TARGET, else the best that the processor runs.
/// An unknown or unusable name is an error of kind kUnsupported that lists the usable ones.
Result<const Table*> select(std::string_view name);

/// As `select(env().cpu_target)`; falls to `ref` when the name is wrong (callers check `select`
/// first).
const Table& active();

/// All tables that this processor can run, best first, `ref` last.
std::vector<const Table*> available();

/// Entries of a COO tensor: rows[i] has row_elems values from values[i × row_elems] on.
struct CooEntries {
  std::span<const std::int64_t> rows;  ///< ≥ 0, checked by the caller; at most 2^32 − 1 of them
  const void* values = nullptr;
  std::size_t row_elems = 1;
  DType dtype = DType::kF32;
};

/// Sorts COO entries by row and adds up duplicates in the order in which they are stored. Writes
/// the distinct rows, ascending, to `rows_out`, and their sums, in sum_dtype(dtype), starting from
/// +0.0, to `sums_out` (rows_out.size() × row_elems). Returns whether any row was stored more than
/// once.
bool coalesce(const Table& table, const CooEntries& entries, CoalesceScratch& scratch,
              Array<std::uint64_t>& rows_out, Buffer& sums_out);

}  // namespace zensync::kernels
