// Reference kernels for offsets on the wire: bitmap, and Elias–Fano (Elias, JACM 1974; Fano, 1971),
// bit by bit. Place: kernels, private. The format is in kernels.hpp.
// `pack_*` trust their caller; `unpack_*` take bytes from elsewhere: any input is read inside its
// bounds, offsets are written for at most `count` set bits, and what is not exactly right gives
// false.
#include <cstring>

#include "ref/ref.hpp"

namespace zensync::kernels::ref {
namespace {

bool get_bit(const std::byte* bytes, std::size_t i) {
  return (static_cast<unsigned>(bytes[i / 8]) >> (i % 8) & 1U) != 0;
}

void set_bit(std::byte* bytes, std::size_t i) { bytes[i / 8] |= std::byte{1} << (i % 8); }

bool any_bit(const std::byte* bytes, std::size_t first, std::size_t end) {
  for (std::size_t i = first; i < end; ++i) {
    if (get_bit(bytes, i)) return true;
  }
  return false;
}

bool counts_fit(std::uint32_t count, std::uint32_t slots) {
  return slots <= kBlockSlots && count <= slots;
}

}  // namespace

void pack_bitmap(const std::uint16_t* offsets, std::uint32_t count, std::uint32_t slots,
                 std::byte* out) {
  std::memset(out, 0, bitmap_bytes(slots));
  for (std::uint32_t i = 0; i < count; ++i) set_bit(out, offsets[i]);
}

bool unpack_bitmap(const std::byte* in, std::uint32_t count, std::uint32_t slots,
                   std::uint16_t* offsets) {
  if (!counts_fit(count, slots)) return false;
  std::uint32_t found = 0;
  for (std::uint32_t slot = 0; slot < slots; ++slot) {
    if (!get_bit(in, slot)) continue;
    if (found == count) return false;
    offsets[found++] = static_cast<std::uint16_t>(slot);
  }
  return found == count && !any_bit(in, slots, bitmap_bytes(slots) * 8);
}

void pack_elias_fano(const std::uint16_t* offsets, std::uint32_t count, std::uint32_t slots,
                     std::byte* out) {
  const unsigned low_bits = elias_fano_low_bits(count, slots);
  const std::size_t upper_bytes =
      elias_fano_bytes(count, slots) - (static_cast<std::size_t>(count) * low_bits + 7) / 8;
  std::memset(out, 0, elias_fano_bytes(count, slots));
  for (std::size_t i = 0; i < count; ++i) {
    set_bit(out, (offsets[i] >> low_bits) + i);
    for (unsigned bit = 0; bit < low_bits; ++bit) {
      if ((offsets[i] >> bit & 1U) != 0) set_bit(out + upper_bytes, i * low_bits + bit);
    }
  }
}

bool unpack_elias_fano(const std::byte* in, std::uint32_t count, std::uint32_t slots,
                       std::uint16_t* offsets) {
  if (!counts_fit(count, slots) || count == 0) return false;
  const unsigned low_bits = elias_fano_low_bits(count, slots);
  const std::size_t low_bytes = (static_cast<std::size_t>(count) * low_bits + 7) / 8;
  const std::size_t upper_bytes = elias_fano_bytes(count, slots) - low_bytes;
  const std::byte* low = in + upper_bytes;
  const std::size_t upper_bits = count + ((slots + (1U << low_bits) - 1) >> low_bits);
  std::uint32_t found = 0;
  std::uint32_t previous = 0;
  for (std::size_t position = 0; position < upper_bits; ++position) {
    if (!get_bit(in, position)) continue;
    if (found == count) return false;
    std::uint32_t offset = static_cast<std::uint32_t>(position - found) << low_bits;
    for (unsigned bit = 0; bit < low_bits; ++bit) {
      offset |= static_cast<std::uint32_t>(get_bit(low, found * low_bits + bit)) << bit;
    }
    if (offset >= slots || (found != 0 && offset <= previous)) return false;
    previous = offset;
    offsets[found++] = static_cast<std::uint16_t>(offset);
  }
  return found == count && !any_bit(in, upper_bits, upper_bytes * 8) &&
         !any_bit(low, static_cast<std::size_t>(count) * low_bits, low_bytes * 8);
}

}  // namespace zensync::kernels::ref
