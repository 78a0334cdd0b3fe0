// SIMD kernels for offsets on the wire: bitmap and Elias–Fano. Place: kernels, private; compiled
// once per Highway target by tables.cpp. The format is in kernels.hpp; ref/pack.cpp says it bit by
// bit. A block is small (kBlockSlots), so the calls that read or write whole words do so on copies
// in arrays of fixed size on the stack, and the caller's bytes are touched by exact copies only.
// `pack_*` trust their caller. `unpack_*` take bytes from elsewhere: they count the set
// bits before they write an offset, and check order and range of all offsets afterwards; what is
// not exact gives false.

// The guard toggles, because this file is included once per target.
#if defined(ZENSYNC_KERNELS_PACK_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ZENSYNC_KERNELS_PACK_INL_HPP
#undef ZENSYNC_KERNELS_PACK_INL_HPP
#else
#define ZENSYNC_KERNELS_PACK_INL_HPP
#endif

HWY_BEFORE_NAMESPACE();
namespace zensync::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Bits of the longest upper part: count ≤ slots, and at most `slots` buckets.
constexpr size_t kMaxBits = 2 * size_t{kBlockSlots};
constexpr size_t kMaxWords = kMaxBits / 64 + 2;
/// Bytes of the longest lower part (count × l is largest at slots / 2 offsets of one bit), rounded
/// up.
constexpr size_t kMaxLowBytes = kBlockSlots / 8 + 32;

/// Sets bit (offsets[i] >> shift) + i × kSpread of `out`, which is zero. By bytes: of two offsets,
/// the second seldom waits for the first one's store, and there is no branch.
template <unsigned kSpread>
HWY_INLINE void set_bits(const uint16_t* offsets, size_t count, unsigned shift, uint8_t* out) {
  for (size_t i = 0; i < count; ++i) {
    const size_t bit = (size_t{offsets[i]} >> shift) + i * kSpread;
    out[bit / 8] = static_cast<uint8_t>(out[bit / 8] | 1U << (bit % 8));
  }
}

/// Loads `bits` bits into words, the last one filled up with zeros; false if bits beyond them, in
/// the last byte, are set, or if the number of set bits is not `count`.
HWY_INLINE bool load_bits(const std::byte* in, size_t bits, size_t count, uint64_t* words) {
  const size_t word_count = (bits + 63) / 64;
  words[word_count] = 0;  // LoadMaskBits may read eight bytes from any of the bytes
  if (word_count == 0) return count == 0;
  words[word_count - 1] = 0;
  std::memcpy(words, in, (bits + 7) / 8);
  size_t set = 0;
  for (size_t i = 0; i < word_count; ++i) set += hwy::PopCount(words[i]);
  const bool is_padded = bits % 64 != 0 && words[word_count - 1] >> (bits % 64) != 0;
  return set == count && !is_padded;
}

/// Writes the positions of the set bits of `words`, ascending.
HWY_INLINE void expand_bits(const uint64_t* words, size_t bits, uint16_t* positions) {
  const hn::CappedTag<uint16_t, 32> d;
  const size_t lanes = hn::Lanes(d);
  const auto* bytes = reinterpret_cast<const uint8_t*>(words);
  const auto step = hn::Set(d, static_cast<uint16_t>(lanes));
  auto position = hn::Iota(d, 0);
  for (size_t i = 0; i < bits; i += lanes, position = hn::Add(position, step)) {
    const auto hit = hn::LoadMaskBits(d, bytes + i / 8);
    hn::StoreU(hn::Compress(position, hit), d, positions);
    positions += hn::CountTrue(d, hit);
  }
}

void pack_bitmap(const uint16_t* offsets, uint32_t count, uint32_t slots, std::byte* out) {
  std::memset(out, 0, bitmap_bytes(slots));
  set_bits<0>(offsets, count, 0, reinterpret_cast<uint8_t*>(out));
}

bool unpack_bitmap(const std::byte* in, uint32_t count, uint32_t slots, uint16_t* offsets) {
  if (slots > kBlockSlots || count > slots) return false;
  uint64_t words[kMaxWords];
  if (!load_bits(in, slots, count, words)) return false;
  expand_bits(words, slots, offsets);
  return true;
}

/// Packs `low_bits` ≥ 1 bits of each offset: eight offsets make low_bits bytes.
HWY_INLINE void pack_low(const uint16_t* offsets, size_t count, unsigned low_bits, uint8_t* out) {
  const uint64_t mask = (uint64_t{1} << low_bits) - 1;
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    uint64_t half[2];
    for (size_t k = 0; k < 2; ++k) {
      const uint16_t* four = offsets + i + 4 * k;
      const uint64_t first = (four[0] & mask) | (four[1] & mask) << low_bits;
      const uint64_t second = (four[2] & mask) | (four[3] & mask) << low_bits;
      half[k] = first | second << (2 * low_bits);
    }
    const uint64_t both[2] = {half[0] | half[1] << (4 * low_bits), half[1] >> (64 - 4 * low_bits)};
    std::memcpy(out + i / 8 * low_bits, both, sizeof(both));
  }
  uint8_t* rest = out + i / 8 * low_bits;
  uint64_t word[2] = {0, 0};
  for (size_t bit = 0; i < count; ++i, bit += low_bits) {
    const uint64_t low = offsets[i] & mask;
    word[bit / 64] |= low << (bit % 64);
    if (bit % 64 + low_bits > 64) word[1] |= low >> (64 - bit % 64);
  }
  std::memcpy(rest, word, sizeof(word));
}

void pack_elias_fano(const uint16_t* offsets, uint32_t count, uint32_t slots, std::byte* out) {
  const unsigned low_bits = elias_fano_low_bits(count, slots);
  const size_t low_bytes = (size_t{count} * low_bits + 7) / 8;
  const size_t upper_bytes = elias_fano_bytes(count, slots) - low_bytes;
  std::memset(out, 0, upper_bytes);
  set_bits<1>(offsets, count, low_bits, reinterpret_cast<uint8_t*>(out));
  if (low_bits == 0) return;
  uint8_t low[kMaxLowBytes];
  pack_low(offsets, count, low_bits, low);
  std::memcpy(out + upper_bytes, low, low_bytes);
}

/// offsets[i] = (offsets[i] − i) << low_bits | the i-th low part. `low` can be read 4 bytes past
/// its end.
HWY_INLINE void join_low(const uint8_t* low, size_t count, unsigned low_bits, uint16_t* offsets) {
  const uint32_t mask = (1U << low_bits) - 1;
  for (size_t i = 0; i < count; ++i) {
    const size_t bit = i * low_bits;
    uint32_t part;
    std::memcpy(&part, low + bit / 8, sizeof(part));
    part = part >> (bit % 8) & mask;
    const uint32_t bucket = static_cast<uint32_t>(offsets[i] - i);
    offsets[i] = static_cast<uint16_t>(bucket << low_bits | part);
  }
}

/// Whether each of `count` ≥ 1 offsets is larger than the one before it.
HWY_INLINE bool ascends(const uint16_t* offsets, size_t count) {
  const hn::CappedTag<uint16_t, 32> d;
  const size_t lanes = hn::Lanes(d);
  auto good = hn::Eq(hn::Zero(d), hn::Zero(d));
  size_t i = 1;
  for (; i + lanes <= count; i += lanes) {
    good = hn::And(good, hn::Gt(hn::LoadU(d, offsets + i), hn::LoadU(d, offsets + i - 1)));
  }
  bool rest = true;
  for (; i < count; ++i) rest &= offsets[i] > offsets[i - 1];
  return rest && hn::AllTrue(d, good);
}

bool unpack_elias_fano(const std::byte* in, uint32_t count, uint32_t slots, uint16_t* offsets) {
  if (slots > kBlockSlots || count > slots || count == 0) return false;
  const unsigned low_bits = elias_fano_low_bits(count, slots);
  const size_t upper_bits = count + ((slots + (size_t{1} << low_bits) - 1) >> low_bits);
  uint64_t words[kMaxWords];
  if (!load_bits(in, upper_bits, count, words)) return false;
  expand_bits(words, upper_bits, offsets);
  const size_t low_bytes = (size_t{count} * low_bits + 7) / 8;
  const unsigned used = static_cast<unsigned>(size_t{count} * low_bits % 8);
  uint8_t low[kMaxLowBytes];
  std::memcpy(low, in + (upper_bits + 7) / 8, low_bytes);
  std::memset(low + low_bytes, 0, 8);
  if (used != 0 && low[low_bytes - 1] >> used != 0) return false;
  join_low(low, count, low_bits, offsets);
  // The buckets ascend, so the last offset is the largest: no sum above can wrap 16 bits.
  return offsets[count - 1] < slots && ascends(offsets, count);
}

}  // namespace HWY_NAMESPACE
}  // namespace zensync::kernels
HWY_AFTER_NAMESPACE();

#endif
