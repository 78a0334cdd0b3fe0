// SIMD kernels that move units: `gather` and `scatter`. Place: kernels, private; compiled once per
// Highway target by tables.cpp. Units of 2, 4 and 8 bytes are moved one by one, larger ones in
// vectors, the last of which overlaps the one before. The loops fetch ahead, because positions
// ascend with gaps that no hardware prefetcher follows. Memory, sizes and results: see kernels.hpp.
// Nothing here allocates or fails.

// The guard toggles, because this file is included once per target.
#if defined(ZENSYNC_KERNELS_MOVE_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ZENSYNC_KERNELS_MOVE_INL_HPP
#undef ZENSYNC_KERNELS_MOVE_INL_HPP
#else
#define ZENSYNC_KERNELS_MOVE_INL_HPP
#endif

HWY_BEFORE_NAMESPACE();
namespace zensync::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Copies by whole `T`s, the last one overlapping; at least one of them must fit.
template <class T>
HWY_INLINE void copy_by(const uint8_t* from, uint8_t* to, size_t bytes) {
  for (size_t i = 0; i + sizeof(T) < bytes; i += sizeof(T)) {
    std::memcpy(to + i, from + i, sizeof(T));
  }
  std::memcpy(to + bytes - sizeof(T), from + bytes - sizeof(T), sizeof(T));
}

template <class D>
HWY_INLINE void copy_vectors(D d, const uint8_t* from, uint8_t* to, size_t bytes) {
  const size_t lanes = hn::Lanes(d);
  for (size_t i = 0; i + lanes < bytes; i += lanes) hn::StoreU(hn::LoadU(d, from + i), d, to + i);
  hn::StoreU(hn::LoadU(d, from + bytes - lanes), d, to + bytes - lanes);
}

/// Two bytes or more. The size is the same for all units of a call, so the branches are foreseen.
HWY_INLINE void copy_unit(const uint8_t* from, uint8_t* to, size_t bytes) {
  const hn::ScalableTag<uint8_t> d;
  const hn::CappedTag<uint8_t, 16> d16;
  if (bytes >= hn::Lanes(d)) return copy_vectors(d, from, to, bytes);
  if (bytes >= hn::Lanes(d16)) return copy_vectors(d16, from, to, bytes);
  if (bytes >= 8) return copy_by<uint64_t>(from, to, bytes);
  if (bytes >= 4) return copy_by<uint32_t>(from, to, bytes);
  if (bytes >= 2) return copy_by<uint16_t>(from, to, bytes);
}

constexpr size_t kMoveAheadBytes = 256;  // of units; at least two and at most 32 of them
constexpr size_t kMoveLines = 4;         // fetched of each; the rest is the hardware's to see

HWY_INLINE size_t move_ahead(size_t unit_bytes) {
  return HWY_MAX(size_t{2}, HWY_MIN(size_t{32}, 4 * kMoveAheadBytes / unit_bytes));
}

HWY_INLINE void fetch_unit(const uint8_t* unit, size_t unit_bytes) {
  const size_t bytes = HWY_MIN(unit_bytes, kMoveLines * 64);
  for (size_t i = 0; i < bytes; i += 64) hwy::Prefetch(unit + i);
}

template <class T>
HWY_INLINE void gather_small(const uint8_t* base, const uint32_t* at, size_t count, uint8_t* out) {
  constexpr size_t kAhead = 32;
  const size_t fetched = count - HWY_MIN(count, kAhead);
  for (size_t i = 0; i < count; ++i) {
    if (i < fetched) hwy::Prefetch(base + size_t{at[i + kAhead]} * sizeof(T));
    std::memcpy(out + i * sizeof(T), base + size_t{at[i]} * sizeof(T), sizeof(T));
  }
}

template <class T>
HWY_INLINE void scatter_small(uint8_t* base, const uint32_t* at, size_t count, const uint8_t* in) {
  constexpr size_t kAhead = 32;
  const size_t fetched = count - HWY_MIN(count, kAhead);
  for (size_t i = 0; i < count; ++i) {
    if (i < fetched) hwy::Prefetch(base + size_t{at[i + kAhead]} * sizeof(T));
    std::memcpy(base + size_t{at[i]} * sizeof(T), in + i * sizeof(T), sizeof(T));
  }
}

void gather(const void* base, const uint32_t* at, size_t count, size_t unit_bytes, void* out) {
  const auto* from = static_cast<const uint8_t*>(base);
  auto* to = static_cast<uint8_t*>(out);
  if (unit_bytes == 2) return gather_small<uint16_t>(from, at, count, to);
  if (unit_bytes == 4) return gather_small<uint32_t>(from, at, count, to);
  if (unit_bytes == 8) return gather_small<uint64_t>(from, at, count, to);
  if (unit_bytes == 0) return;
  const size_t ahead = move_ahead(unit_bytes);
  const size_t fetched = count - HWY_MIN(count, ahead);
  for (size_t i = 0; i < count; ++i) {
    if (i < fetched) fetch_unit(from + size_t{at[i + ahead]} * unit_bytes, unit_bytes);
    copy_unit(from + size_t{at[i]} * unit_bytes, to + i * unit_bytes, unit_bytes);
  }
}

void scatter(void* base, const uint32_t* at, size_t count, size_t unit_bytes, const void* in) {
  auto* to = static_cast<uint8_t*>(base);
  const auto* from = static_cast<const uint8_t*>(in);
  if (unit_bytes == 2) return scatter_small<uint16_t>(to, at, count, from);
  if (unit_bytes == 4) return scatter_small<uint32_t>(to, at, count, from);
  if (unit_bytes == 8) return scatter_small<uint64_t>(to, at, count, from);
  if (unit_bytes == 0) return;
  const size_t ahead = move_ahead(unit_bytes);
  const size_t fetched = count - HWY_MIN(count, ahead);
  for (size_t i = 0; i < count; ++i) {
    if (i < fetched) fetch_unit(to + size_t{at[i + ahead]} * unit_bytes, unit_bytes);
    copy_unit(from + i * unit_bytes, to + size_t{at[i]} * unit_bytes, unit_bytes);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace zensync::kernels
HWY_AFTER_NAMESPACE();

#endif
