// Writing messages. Place: codec. The index grows in a buffer of its own beside the values;
// `finish` appends it, chooses raw for a handful, and fills the header. Allocates only when a
// message is larger than any before.
#include <cstring>

#include "zensync/base/hash.hpp"
#include "zensync/codec/message.hpp"

namespace zensync {

void MessageWriter::begin(const kernels::Table& table, const MessageHeader& header,
                          std::span<const JobHeader> job_headers, std::uint64_t slots) {
  table_ = &table;
  header_ = header;
  policy_ = header.codec;
  slots_ = slots;
  next_block_ = 0;
  header_.units = 0;
  header_.job_headers = static_cast<std::uint16_t>(job_headers.size());
  index_.clear();
  raw_.clear();
  buffer_.clear();
  buffer_.append(&header_, sizeof header_);
  buffer_.append(job_headers.data(), job_headers.size_bytes());
}

std::byte* MessageWriter::add_values(std::size_t bytes) {
  const std::size_t at = buffer_.size();
  buffer_.resize_keep(at + bytes);
  return buffer_.data() + at;
}

void MessageWriter::add_block(std::uint64_t block, std::span<const std::uint16_t> offsets) {
  if (offsets.empty()) return;
  const bool only_raw = policy_ == IndexCodec::kRaw32 || policy_ == IndexCodec::kRaw64;
  for (std::size_t i = 0; i < offsets.size() && (only_raw || raw_.size() < kRawUnits); ++i) {
    raw_.push_back(block * kernels::kBlockSlots + offsets[i]);
  }
  header_.units += static_cast<std::uint32_t>(offsets.size());
  if (only_raw) return;
  write_block(*table_, policy_, {block - next_block_, offsets, slots_of_block(block, slots_)},
              index_);
  next_block_ = block + 1;
}

void MessageWriter::add_set(const SparseSet& set, std::size_t values_bytes) {
  for (const BlockRun& run : set.runs) {
    add_block(run.block, {set.offsets.data() + run.begin, run.count});
  }
  if (values_bytes != 0) std::memcpy(add_values(values_bytes), set.values, values_bytes);
}

std::span<const std::byte> MessageWriter::finish(bool verify) {
  if (policy_ == IndexCodec::kNone) {
    header_.index_bytes = 0;
  } else {
    const IndexChoice choice = choose_index(policy_, header_.units, slots_, index_.size());
    header_.codec = choice.codec;
    header_.index_bytes = choice.bytes;
    std::byte* out = add_values(choice.bytes);
    if (choice.codec == IndexCodec::kRaw64) {
      std::memcpy(out, raw_.data(), choice.bytes);
    } else if (choice.codec == IndexCodec::kRaw32) {
      for (std::size_t i = 0; i < header_.units; ++i) {
        const auto slot = static_cast<std::uint32_t>(raw_[i]);
        std::memcpy(out + i * sizeof slot, &slot, sizeof slot);
      }
    } else if (choice.bytes != 0) {
      std::memcpy(out, index_.data(), choice.bytes);
    }
  }
  header_.digest = 0;
  std::memcpy(buffer_.data(), &header_, sizeof header_);
  if (verify) {
    constexpr std::size_t kDigestBytes = sizeof header_.digest;
    header_.digest = digest64(buffer_.data() + kDigestBytes, buffer_.size() - kDigestBytes);
    std::memcpy(buffer_.data(), &header_.digest, kDigestBytes);
  }
  return buffer_.bytes();
}

}  // namespace zensync
