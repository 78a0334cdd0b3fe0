// Writing and reading block indexes. Place: codec. Reading trusts nothing: lengths, counts, order
// and padding are checked before an offset is used (simdjson's rule: decode safely, validate, use).
#include "zensync/codec/index_codec.hpp"

#include <algorithm>
#include <cstring>

namespace zensync {
namespace {

using kernels::kBlockSlots;

Error corrupt(const char* what) {
  return make_error(ErrorKind::kCorruptMessage, std::string("index: ") + what);
}

void put_varint(Buffer& out, std::uint64_t value) {
  std::uint8_t bytes[10];
  std::size_t count = 0;
  for (; value >= 128; value >>= 7) bytes[count++] = static_cast<std::uint8_t>(value | 128);
  bytes[count++] = static_cast<std::uint8_t>(value);
  out.append(bytes, count);
}

/// Reads a shortest-form varint of at most 63 bits; false if there is none.
bool get_varint(std::span<const std::byte>& in, std::uint64_t& value) {
  value = 0;
  for (unsigned i = 0; i < 9 && i < in.size(); ++i) {
    const auto byte = static_cast<std::uint64_t>(in[i]);
    value |= (byte & 127) << (7 * i);
    if (byte < 128) {
      if (i > 0 && byte == 0) return false;
      in = in.subspan(i + 1);
      return true;
    }
  }
  return false;
}

template <class T>
Status read_raw(const IndexBytes& index, SparseSet& set) {
  if (index.bytes.size() != index.units * sizeof(T)) return corrupt("raw slots do not fill it");
  set.offsets.resize_discard(index.units);
  std::uint64_t next = 0;
  for (std::uint32_t i = 0; i < index.units; ++i) {
    T slot;
    std::memcpy(&slot, index.bytes.data() + i * sizeof(T), sizeof(T));
    if (slot < next || slot >= index.slots) return corrupt("raw slots out of order or range");
    next = static_cast<std::uint64_t>(slot) + 1;
    const std::uint64_t block = slot / kBlockSlots;
    if (set.runs.empty() || set.runs.back().block != block) set.runs.push_back({block, i, 0});
    ++set.runs.back().count;
    set.offsets[i] = static_cast<std::uint16_t>(slot % kBlockSlots);
  }
  return {};
}

struct BlockReader {
  const kernels::Table& table;
  IndexCodec codec;
  std::uint64_t slots;
  std::span<const std::byte> in;
  std::uint64_t next_block = 0;

  /// Reads one block of at most `left` units to the end of `set`.
  Status read(std::uint32_t left, SparseSet& set) {
    std::uint64_t skipped = 0;
    std::uint64_t count_less_1 = 0;
    if (!get_varint(in, skipped) || !get_varint(in, count_less_1)) return corrupt("bad varint");
    const std::uint64_t blocks = div_ceil(slots, kBlockSlots);
    if (next_block >= blocks || skipped >= blocks - next_block)
      return corrupt("block out of range");
    const std::uint64_t block = next_block + skipped;
    const std::uint32_t block_slots = slots_of_block(block, slots);
    if (count_less_1 >= block_slots || count_less_1 >= left) return corrupt("too many units");
    const auto count = static_cast<std::uint32_t>(count_less_1 + 1);
    const bool elias_fano = uses_elias_fano(codec, count, block_slots);
    const std::size_t bytes = elias_fano ? kernels::elias_fano_bytes(count, block_slots)
                                         : kernels::bitmap_bytes(block_slots);
    if (in.size() < bytes) return corrupt("ends within a block");
    const auto begin = set.units();
    auto* offsets = set.offsets.data() + begin;
    const bool good = elias_fano ? table.unpack_elias_fano(in.data(), count, block_slots, offsets)
                                 : table.unpack_bitmap(in.data(), count, block_slots, offsets);
    if (!good) return corrupt("a block does not hold the stated units");
    in = in.subspan(bytes);
    next_block = block + 1;
    set.runs.push_back({block, begin, count});
    return {};
  }
};

}  // namespace

IndexChoice choose_index(IndexCodec policy, std::uint64_t units, std::uint64_t slots,
                         std::uint64_t blocks_bytes) {
  if (units == 0) return {IndexCodec::kNone, 0};
  const IndexCodec raw = raw_codec(slots);
  const std::uint64_t raw_bytes = units * raw_unit_bytes(raw);
  if (policy == IndexCodec::kRaw32 || policy == IndexCodec::kRaw64) return {raw, raw_bytes};
  const bool handful = policy == IndexCodec::kBlocks && units <= kRawUnits;
  if (handful && raw_bytes <= blocks_bytes) return {raw, raw_bytes};
  return {policy, blocks_bytes};
}

void write_block(const kernels::Table& table, IndexCodec codec, const BlockUnits& block,
                 Buffer& out) {
  const auto count = static_cast<std::uint32_t>(block.offsets.size());
  put_varint(out, block.skipped);
  put_varint(out, count - 1);
  const bool elias_fano = uses_elias_fano(codec, count, block.slots);
  const std::size_t bytes = elias_fano ? kernels::elias_fano_bytes(count, block.slots)
                                       : kernels::bitmap_bytes(block.slots);
  const std::size_t at = out.size();
  out.resize_keep(at + bytes);
  const auto pack = elias_fano ? table.pack_elias_fano : table.pack_bitmap;
  pack(block.offsets.data(), count, block.slots, out.data() + at);
}

Status read_index(const kernels::Table& table, const IndexBytes& index, SparseSet& set) {
  set.runs.clear();
  set.offsets.clear();
  if (index.units > index.slots) return corrupt("more units than slots");
  if (index.codec == IndexCodec::kNone) {
    return index.units == 0 && index.bytes.empty() ? Status() : Status(corrupt("missing"));
  }
  if (index.units == 0) return corrupt("present though there are no units");
  if (index.codec == IndexCodec::kRaw32) return read_raw<std::uint32_t>(index, set);
  if (index.codec == IndexCodec::kRaw64) return read_raw<std::uint64_t>(index, set);
  // A unit takes one bit at least, in a bitmap as in Elias–Fano: a short message that states many
  // units gets no memory for them.
  if (div_ceil(index.units, 8) > index.bytes.size()) {
    return corrupt("too short for its units");
  }
  set.offsets.resize_discard(index.units + kernels::kSlackElems);
  BlockReader reader{table, index.codec, index.slots, index.bytes};
  while (set.units() < index.units) {
    Status status = reader.read(index.units - set.units(), set);
    if (!status.ok()) return status;
  }
  if (!reader.in.empty()) return corrupt("bytes left over");
  return {};
}

}  // namespace zensync
