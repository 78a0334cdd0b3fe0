// SIMD kernels that look for what is not zero: `find_units` and `count_nonzero`.
// Place: kernels, private; compiled once per Highway target by tables.cpp. Elements are read as
// unsigned integers. Memory, sizes and results: see kernels.hpp. Nothing here allocates or fails.
// Three ways, by the size of a unit: single elements are compacted vector by vector, without a
// branch that depends on the data; narrow units (less than a vector) go through one bit per
// element; of wide units all vectors are OR-ed together and tested once. Compaction happens in a
// register and the whole vector is stored (kSlackElems): compressing into memory is microcoded on
// some processors (Zen 4: uops.info, VPCOMPRESSD with a memory operand). A −0.0 makes a rare second
// pass over the few vectors in cache, so that the common pass reads only.

// The guard toggles, because this file is included once per target.
#if defined(ZENSYNC_KERNELS_FIND_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ZENSYNC_KERNELS_FIND_INL_HPP
#undef ZENSYNC_KERNELS_FIND_INL_HPP
#else
#define ZENSYNC_KERNELS_FIND_INL_HPP
#endif

HWY_BEFORE_NAMESPACE();
namespace zensync::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class E>
inline constexpr E kSignBit = static_cast<E>(E{1} << (sizeof(E) * 8 - 1));

/// Lanes whose element has a bit besides the sign (floats) or any bit (integers).
template <bool kFloat, class D, class V = hn::Vec<D>>
HWY_INLINE hn::Mask<D> nonzero_lanes(D d, V v) {
  if constexpr (kFloat) v = hn::Add(v, v);  // the sign falls out
  return hn::Ne(v, hn::Zero(d));
}

template <bool kFloat, class E>
HWY_INLINE bool is_nonzero(E bits) {
  return kFloat ? static_cast<E>(bits + bits) != 0 : bits != 0;
}

/// Writes +0.0 over each −0.0 of `elems` elements; stores only vectors that have one.
template <class E>
HWY_NOINLINE void clear_negative_zeros(E* data, size_t elems) {
  const hn::ScalableTag<E> d;
  const size_t lanes = hn::Lanes(d);
  const auto negative_zero = hn::Set(d, kSignBit<E>);
  size_t i = 0;
  for (; i + lanes <= elems; i += lanes) {
    const auto v = hn::LoadU(d, data + i);
    const auto hit = hn::Eq(v, negative_zero);
    if (!hn::AllFalse(d, hit)) hn::StoreU(hn::IfThenZeroElse(hit, v), d, data + i);
  }
  for (; i < elems; ++i) {
    if (data[i] == kSignBit<E>) data[i] = 0;
  }
}

using D32 = hn::ScalableTag<uint32_t>;
using V32 = hn::Vec<D32>;

/// One 32-bit lane per element, with the sign in bit 31 and other bits only if the element has
/// some.
template <bool kFloat, class E>
HWY_INLINE V32 load_as_32(const E* data) {
  const D32 d;
  if constexpr (sizeof(E) == 4) {
    return hn::LoadU(d, data);
  } else if constexpr (sizeof(E) == 2) {
    const hn::Rebind<uint16_t, D32> d16;
    return hn::ShiftLeft<16>(hn::PromoteTo(d, hn::LoadU(d16, data)));
  } else {
    const hn::Repartition<uint64_t, D32> d64;
    const auto first = hn::BitCast(d, hn::LoadU(d64, data));
    const auto second = hn::BitCast(d, hn::LoadU(d64, data + hn::Lanes(d64)));
    const V32 high = hn::ConcatOdd(d, second, first);
    const V32 low = hn::ConcatEven(d, second, first);
    if constexpr (!kFloat) return hn::Or(high, low);
    return hn::Or(high, hn::Or(hn::ShiftRight<1>(low), hn::And(low, hn::Set(d, 1))));
  }
}

template <bool kFloat>
HWY_INLINE size_t store_indices(V32 bits, V32 index, uint32_t* out) {
  const D32 d;
  const auto hit = nonzero_lanes<kFloat>(d, bits);
  hn::StoreU(hn::Compress(index, hit), d, out);
  return hn::CountTrue(d, hit);
}

/// Units of one element.
template <class E, bool kFloat>
size_t find_singles(E* data, size_t units, uint32_t* out) {
  const D32 d;
  const hn::RebindToSigned<D32> di;
  const size_t lanes = hn::Lanes(d);
  const V32 step = hn::Set(d, static_cast<uint32_t>(lanes));
  V32 index = hn::Iota(d, 0);
  size_t found = 0;
  size_t i = 0;
  for (; i + 4 * lanes <= units; i += 4 * lanes) {
    const V32 a = load_as_32<kFloat>(data + i);
    const V32 b = load_as_32<kFloat>(data + i + lanes);
    const V32 c = load_as_32<kFloat>(data + i + 2 * lanes);
    const V32 e = load_as_32<kFloat>(data + i + 3 * lanes);
    if constexpr (kFloat) {
      // −0.0 is the least of all signed integers.
      const auto least = hn::Min(hn::Min(hn::BitCast(di, a), hn::BitCast(di, b)),
                                 hn::Min(hn::BitCast(di, c), hn::BitCast(di, e)));
      const auto hit = hn::Eq(hn::BitCast(d, least), hn::Set(d, kSignBit<uint32_t>));
      if (!hn::AllFalse(d, hit)) clear_negative_zeros(data + i, 4 * lanes);
    }
    found += store_indices<kFloat>(a, index, out + found);
    index = hn::Add(index, step);
    found += store_indices<kFloat>(b, index, out + found);
    index = hn::Add(index, step);
    found += store_indices<kFloat>(c, index, out + found);
    index = hn::Add(index, step);
    found += store_indices<kFloat>(e, index, out + found);
    index = hn::Add(index, step);
  }
  if constexpr (kFloat) clear_negative_zeros(data + i, units - i);
  for (; i < units; ++i) {
    out[found] = static_cast<uint32_t>(i);
    found += is_nonzero<kFloat>(data[i]) ? 1 : 0;
  }
  return found;
}

/// Sets bit i of `words` if element i is non-zero, i < elems, elems ≥ 1; clears −0.0.
template <class E, bool kFloat>
void mark_nonzero(E* data, size_t elems, uint64_t* words) {
  const hn::ScalableTag<E> d;
  const size_t lanes = hn::Lanes(d);
  auto* bytes = reinterpret_cast<uint8_t*>(words);
  const size_t step = lanes < 8 ? 8 : lanes;
  words[(elems - 1) / 64] = 0;  // below, perhaps not all bytes of the last word are stored
  size_t i = 0;
  for (; i + step <= elems; i += step) {
    uint8_t part[8] = {};
    uint8_t joined = 0;
    for (size_t j = 0; j < step; j += lanes) {
      const auto v = hn::LoadU(d, data + i + j);
      const auto hit = nonzero_lanes<kFloat>(d, v);
      if (lanes >= 8) {
        hn::StoreMaskBits(d, hit, bytes + i / 8);
      } else {
        hn::StoreMaskBits(d, hit, part);
        joined = static_cast<uint8_t>(joined | part[0] << j);
      }
      if constexpr (kFloat) {
        const auto negative_zero = hn::Eq(v, hn::Set(d, kSignBit<E>));
        if (!hn::AllFalse(d, negative_zero)) {
          hn::StoreU(hn::IfThenZeroElse(negative_zero, v), d, data + i + j);
        }
      }
    }
    if (lanes < 8) bytes[i / 8] = joined;
  }
  if constexpr (kFloat) clear_negative_zeros(data + i, elems - i);
  for (; i < elems; ++i) {
    if (is_nonzero<kFloat>(data[i])) words[i / 64] |= uint64_t{1} << (i % 64);
  }
}

/// Units of more than one element but less than a vector.
template <class E, bool kFloat>
size_t find_narrow(E* data, size_t units, size_t width, uint32_t* out) {
  constexpr size_t kBlockElems = 4096;
  uint64_t words[kBlockElems / 64];
  const bool is_power = (width & (width - 1)) == 0;
  const unsigned shift = hwy::Num0BitsBelowLS1Bit_Nonzero64(width);
  const size_t elems = units * width;
  size_t found = 0;
  size_t next = 0;  // elements before this one belong to units that are found already
  for (size_t block = 0; block < elems; block += kBlockElems) {
    const size_t block_elems = HWY_MIN(kBlockElems, elems - block);
    mark_nonzero<E, kFloat>(data + block, block_elems, words);
    for (size_t begin = block; begin < block + block_elems; begin += 64) {
      uint64_t bits = words[(begin - block) / 64];
      while (bits != 0) {
        if (next > begin) {
          if (next - begin >= 64) break;
          bits &= ~uint64_t{0} << (next - begin);
          if (bits == 0) break;
        }
        const size_t elem = begin + hwy::Num0BitsBelowLS1Bit_Nonzero64(bits);
        const size_t unit = is_power ? elem >> shift : elem / width;
        out[found++] = static_cast<uint32_t>(unit);
        next = (unit + 1) * width;
      }
    }
  }
  return found;
}

/// Whether one of `elems` elements (a vector of them at least) is non-zero; clears −0.0.
template <class E, bool kFloat>
HWY_INLINE bool scan_run(E* data, size_t elems) {
  const hn::ScalableTag<E> d;
  const size_t lanes = hn::Lanes(d);
  auto all = hn::LoadU(d, data + elems - lanes);
  size_t i = 0;
  for (; i + 4 * lanes <= elems; i += 4 * lanes) {
    const auto a = hn::Or(hn::LoadU(d, data + i), hn::LoadU(d, data + i + lanes));
    const auto b = hn::Or(hn::LoadU(d, data + i + 2 * lanes), hn::LoadU(d, data + i + 3 * lanes));
    all = hn::Or(all, hn::Or(a, b));
  }
  for (; i + lanes <= elems; i += lanes) all = hn::Or(all, hn::LoadU(d, data + i));
  if (hn::AllTrue(d, hn::Eq(all, hn::Zero(d)))) return false;
  if constexpr (kFloat) clear_negative_zeros(data, elems);
  return !hn::AllFalse(d, nonzero_lanes<kFloat>(d, all));
}

/// Units of a vector or more.
template <class E, bool kFloat>
size_t find_wide(E* data, size_t units, size_t width, uint32_t* out) {
  const size_t lanes = hn::Lanes(hn::ScalableTag<E>());
  const size_t run_elems = 64 * lanes;  // a few KiB, so that a second pass finds it in L1
  size_t found = 0;
  for (size_t unit = 0; unit < units; ++unit, data += width) {
    bool nonzero = false;
    for (size_t j = 0; j < width; j += run_elems) {
      const size_t first = HWY_MIN(j, width - lanes);
      nonzero |= scan_run<E, kFloat>(data + first, HWY_MIN(run_elems, width - first));
    }
    out[found] = static_cast<uint32_t>(unit);
    found += nonzero ? 1 : 0;
  }
  return found;
}

template <class E, bool kFloat>
size_t find_any(void* data, size_t units, size_t width, uint32_t* out) {
  auto* elems = static_cast<E*>(data);
  if (width == 1) return find_singles<E, kFloat>(elems, units, out);
  if (width == 0) return 0;
  if (width < hn::Lanes(hn::ScalableTag<E>())) {
    return find_narrow<E, kFloat>(elems, units, width, out);
  }
  return find_wide<E, kFloat>(elems, units, width, out);
}

size_t find_units(void* data, size_t units, size_t width, DType dtype, uint32_t* out) {
  switch (dtype) {
    case DType::kF32:
      return find_any<uint32_t, true>(data, units, width, out);
    case DType::kF64:
      return find_any<uint64_t, true>(data, units, width, out);
    case DType::kBF16:
    case DType::kF16:
      return find_any<uint16_t, true>(data, units, width, out);
    case DType::kI32:
      return find_any<uint32_t, false>(data, units, width, out);
    case DType::kI64:
      return find_any<uint64_t, false>(data, units, width, out);
  }
  return 0;
}

template <class E, bool kFloat>
uint64_t count_any(const void* data, size_t elems) {
  const hn::ScalableTag<E> d;
  const size_t lanes = hn::Lanes(d);
  const auto* elem = static_cast<const E*>(data);
  uint64_t count = 0;
  size_t i = 0;
  for (; i + lanes <= elems; i += lanes) {
    count += hn::CountTrue(d, nonzero_lanes<kFloat>(d, hn::LoadU(d, elem + i)));
  }
  for (; i < elems; ++i) count += is_nonzero<kFloat>(elem[i]) ? 1 : 0;
  return count;
}

uint64_t count_nonzero(const void* data, size_t elems, DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return count_any<uint32_t, true>(data, elems);
    case DType::kF64:
      return count_any<uint64_t, true>(data, elems);
    case DType::kBF16:
    case DType::kF16:
      return count_any<uint16_t, true>(data, elems);
    case DType::kI32:
      return count_any<uint32_t, false>(data, elems);
    case DType::kI64:
      return count_any<uint64_t, false>(data, elems);
  }
  return 0;
}

}  // namespace HWY_NAMESPACE
}  // namespace zensync::kernels
HWY_AFTER_NAMESPACE();

#endif
