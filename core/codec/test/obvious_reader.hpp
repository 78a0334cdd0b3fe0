// A second reader of messages, bit by bit from docs/wire_format.md, and makers of slots. Place:
// tests of codec. It shares no code with the codec: what both read alike is what the document says.
// It expects valid messages (of a writer or a golden file) and fails the test on others.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "zensync/codec/message.hpp"

namespace zensync::test {

using Bytes = std::vector<std::byte>;
using Slots = std::vector<std::uint64_t>;

inline std::uint64_t integer_at(std::span<const std::byte> bytes, std::size_t at, int size_bytes) {
  std::uint64_t value = 0;
  for (int i = 0; i < size_bytes; ++i) {
    value |= static_cast<std::uint64_t>(bytes[at + static_cast<std::size_t>(i)]) << (8 * i);
  }
  return value;
}

inline bool bit_at(std::span<const std::byte> bytes, std::uint64_t bit) {
  return ((static_cast<unsigned>(bytes[bit / 8]) >> (bit % 8)) & 1) != 0;
}

/// Reads an index that was written under `codec` over `slots` slots.
class ObviousReader {
 public:
  ObviousReader(std::span<const std::byte> index, std::uint64_t slots)
      : index_(index), slots_(slots) {}

  Slots read(IndexCodec codec, std::uint64_t units) {
    Slots found;
    const int raw_bytes = codec == IndexCodec::kRaw32 ? 4 : codec == IndexCodec::kRaw64 ? 8 : 0;
    if (raw_bytes != 0) {
      for (std::uint64_t i = 0; i < units; ++i, at_ += static_cast<std::size_t>(raw_bytes)) {
        found.push_back(integer_at(index_, at_, raw_bytes));
      }
    } else {
      std::uint64_t block = 0;
      while (found.size() < units) {
        block += read_varint();
        read_block(codec, block, read_varint() + 1, found);
        ++block;
      }
    }
    EXPECT_EQ(at_, index_.size()) << "bytes are left over";
    return found;
  }

 private:
  std::uint64_t read_varint() {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<std::uint64_t>(index_[at_++]);
      value |= (byte & 127) << shift;
      if (byte < 128) return value;
    }
  }

  void read_block(IndexCodec codec, std::uint64_t block, std::uint64_t count, Slots& found) {
    const std::uint64_t first = block * 16384;
    const std::uint64_t size = std::min<std::uint64_t>(16384, slots_ - first);
    std::uint64_t low_bits = 0;
    while ((count << (low_bits + 1)) <= size) ++low_bits;
    const std::uint64_t buckets = (size >> low_bits) + ((size & ((1ULL << low_bits) - 1)) != 0);
    const std::uint64_t upper_bytes = (count + buckets + 7) / 8;
    const std::uint64_t packed_bytes = upper_bytes + (count * low_bits + 7) / 8;
    const std::uint64_t bitmap_bytes = (size + 7) / 8;
    const bool is_packed = codec == IndexCodec::kEliasFano ||
                           (codec == IndexCodec::kBlocks && packed_bytes < bitmap_bytes);
    const auto bytes = index_.subspan(at_, is_packed ? packed_bytes : bitmap_bytes);
    at_ += bytes.size();
    if (!is_packed) {
      for (std::uint64_t bit = 0; bit < size; ++bit) {
        if (bit_at(bytes, bit)) found.push_back(first + bit);
      }
      return;
    }
    std::uint64_t i = 0;
    for (std::uint64_t bit = 0; i < count; ++bit) {
      if (!bit_at(bytes, bit)) continue;
      std::uint64_t offset = (bit - i) << low_bits;
      for (std::uint64_t low = 0; low < low_bits; ++low) {
        const bool is_set = bit_at(bytes.subspan(upper_bytes), i * low_bits + low);
        offset |= static_cast<std::uint64_t>(is_set) << low;
      }
      found.push_back(first + offset);
      ++i;
    }
  }

  std::span<const std::byte> index_;
  std::uint64_t slots_;
  std::size_t at_ = 0;
};

/// The slots of a set, and whether its structure is sound: blocks ascend, offsets ascend and lie in
/// their block, counts add up.
struct Walk {
  bool is_sound = true;
  Slots slots;
};
inline Walk walk(const SparseSet& set, std::uint64_t slots) {
  Walk result;
  std::uint64_t next_block = 0;
  std::size_t next_begin = 0;
  for (const BlockRun& run : set.runs) {
    const bool is_placed = run.block >= next_block && run.begin == next_begin && run.count != 0 &&
                           run.block * 16384 < slots && run.begin + run.count <= set.offsets.size();
    result.is_sound = result.is_sound && is_placed;
    if (!is_placed) return result;
    next_block = run.block + 1;
    next_begin += run.count;
    for (std::uint32_t i = run.begin; i < run.begin + run.count; ++i) {
      const std::uint64_t slot = run.block * 16384 + set.offsets[i];
      const bool ascends = i == run.begin || set.offsets[i] > set.offsets[i - 1];
      result.is_sound = result.is_sound && ascends && set.offsets[i] < 16384 && slot < slots;
      result.slots.push_back(slot);
    }
  }
  return result;
}

/// A message without its slots.
struct MessageSpec {
  MessageHeader header;
  std::vector<JobHeader> job_headers;
  std::uint64_t slots = 0;
  std::size_t unit_bytes = 4;
  bool verify = true;
};

/// Writes a message with a unit at each of `found` (ascending), its values counted up.
inline Bytes write_message(const kernels::Table& table, const MessageSpec& spec, const Slots& found,
                           MessageWriter& writer) {
  writer.begin(table, spec.header, spec.job_headers, spec.slots);
  std::vector<std::uint16_t> offsets;
  std::size_t value = 0;
  for (std::size_t i = 0; i < found.size();) {
    const std::uint64_t block = found[i] / 16384;
    offsets.clear();
    for (; i < found.size() && found[i] / 16384 == block; ++i) {
      offsets.push_back(static_cast<std::uint16_t>(found[i] % 16384));
    }
    std::byte* values = writer.add_values(offsets.size() * spec.unit_bytes);
    for (std::size_t j = 0; j < offsets.size() * spec.unit_bytes; ++j) {
      values[j] = static_cast<std::byte>(value++ * 7 + 1);
    }
    writer.add_block(block, offsets);
  }
  const auto bytes = writer.finish(spec.verify);
  return {bytes.begin(), bytes.end()};
}

inline Expected expected_of(const MessageSpec& spec, std::uint64_t width, DType dtype) {
  Expected expected;
  expected.kind = spec.header.kind;
  expected.sequence = spec.header.sequence;
  expected.chunk = spec.header.chunk;
  expected.job_headers = static_cast<std::uint16_t>(spec.job_headers.size());
  expected.slots = spec.slots;
  expected.width = width;
  expected.dtype = dtype;
  expected.verify = spec.verify;
  return expected;
}

/// Copies to the heap at its exact size, so that ASan sees a read beyond the end.
inline Result<ParsedMessage> parse_exact(const Bytes& message, const Expected& expected,
                                         Bytes& holder) {
  holder = Bytes(message.begin(), message.end());
  holder.shrink_to_fit();
  return parse_message(holder, expected);
}

}  // namespace zensync::test
