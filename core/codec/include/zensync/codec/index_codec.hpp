// The index of a message: which of its slots carry a unit.
// Place: codec, level 2. Blocks of 2^14 slots; each non-empty block is written as varint(blocks
// skipped), varint(count − 1), then its offsets as a bitmap or Elias–Fano, whichever is smaller
// (both ends compute which). Empty blocks cost nothing. Whole messages of a handful of units are
// raw. The sizes here are what `traffic` uses, so both agree.
// Memory is the caller's; `write_block` appends to a Buffer, `read_index` fills a SparseSet, and
// both grow what they fill (std::bad_alloc). Pure otherwise; any thread, on memory no one else
// writes.
// Writing trusts its caller. Reading trusts nothing and fails with kCorruptMessage.
#pragma once

#include <cstdint>
#include <span>

#include "zensync/base/result.hpp"
#include "zensync/codec/headers.hpp"
#include "zensync/codec/sparse_set.hpp"
#include "zensync/kernels/kernels.hpp"

namespace zensync {

/// At most this many units are tried as raw slots.
inline constexpr std::uint32_t kRawUnits = 16;

constexpr std::uint64_t varint_bytes(std::uint64_t value) {
  std::uint64_t bytes = 1;
  for (; value >= 128; value >>= 7) ++bytes;
  return bytes;
}

/// Whether a block is written as Elias–Fano (else as a bitmap) under `codec`.
constexpr bool uses_elias_fano(IndexCodec codec, std::uint32_t count, std::uint32_t slots) {
  if (codec == IndexCodec::kBlocks) {
    return kernels::elias_fano_bytes(count, slots) < kernels::bitmap_bytes(slots);
  }
  return codec == IndexCodec::kEliasFano;
}

/// Bytes of one non-empty block: `skipped` empty ones lie before it.
constexpr std::uint64_t block_bytes(IndexCodec codec, std::uint64_t skipped, std::uint32_t count,
                                    std::uint32_t slots) {
  const std::uint64_t packed = uses_elias_fano(codec, count, slots)
                                   ? kernels::elias_fano_bytes(count, slots)
                                   : kernels::bitmap_bytes(slots);
  return varint_bytes(skipped) + varint_bytes(count - 1) + packed;
}

/// Slots of block `block` of a range of `slots` slots.
constexpr std::uint32_t slots_of_block(std::uint64_t block, std::uint64_t slots) {
  const std::uint64_t left = slots - block * kernels::kBlockSlots;
  return left < kernels::kBlockSlots ? static_cast<std::uint32_t>(left) : kernels::kBlockSlots;
}

/// The raw codec for a range of `slots` slots.
constexpr IndexCodec raw_codec(std::uint64_t slots) {
  return slots <= (1ULL << 32) ? IndexCodec::kRaw32 : IndexCodec::kRaw64;
}
constexpr std::uint64_t raw_unit_bytes(IndexCodec codec) {
  return codec == IndexCodec::kRaw32 ? 4 : 8;
}

/// What a scheme asks for: kBlocks (then a handful goes raw where that is smaller), or one codec
/// for all messages (kRaw32 stands for whichever raw fits).
struct IndexChoice {
  IndexCodec codec = IndexCodec::kNone;
  std::uint64_t bytes = 0;
};
/// What is written for `units` units in `slots` slots whose blocks take `blocks_bytes` bytes.
IndexChoice choose_index(IndexCodec policy, std::uint64_t units, std::uint64_t slots,
                         std::uint64_t blocks_bytes);

/// One block as it is written: `offsets` of its units, ascending; `skipped` empty blocks lie before
/// it.
struct BlockUnits {
  std::uint64_t skipped = 0;
  std::span<const std::uint16_t> offsets;
  std::uint32_t slots = 0;
};

/// Appends the index bytes of one block to `out`.
void write_block(const kernels::Table& table, IndexCodec codec, const BlockUnits& block,
                 Buffer& out);

/// An index as it came: its bytes, and what its message says of it.
struct IndexBytes {
  IndexCodec codec = IndexCodec::kNone;
  std::span<const std::byte> bytes;
  std::uint32_t units = 0;
  std::uint64_t slots = 0;  ///< of the range that the message covers
};

/// Reads an index into `set` (runs, offsets). Every structural fault is kCorruptMessage with the
/// field in words; nothing outside `index.bytes` is read, nothing is written beyond memory for
/// `index.units` units.
Status read_index(const kernels::Table& table, const IndexBytes& index, SparseSet& set);

}  // namespace zensync
