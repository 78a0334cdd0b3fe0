// SIMD kernels that compute: `add_units` and `finish`, with the conversions of 16-bit floats.
// Place: kernels, private; compiled once per Highway target by tables.cpp. Same bits as
// ref/sum.cpp: units are added in the order given, a NaN accumulator wins over a NaN value, DAZ and
// FTZ are cleared. Conversions are integer operations on every target, so that none depends on what
// a processor converts by itself. Tails use the same code on narrower vectors, down to one lane.
// Memory, sizes and results: see kernels.hpp. Nothing here allocates or fails.

// The guard toggles, because this file is included once per target.
#if defined(ZENSYNC_KERNELS_SUM_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ZENSYNC_KERNELS_SUM_INL_HPP
#undef ZENSYNC_KERNELS_SUM_INL_HPP
#else
#define ZENSYNC_KERNELS_SUM_INL_HPP
#endif

HWY_BEFORE_NAMESPACE();
namespace zensync::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// How elements of a dtype are stored, summed and converted. `D` is a tag of lanes of Sum.
template <class T>
struct Plain {
  using Sum = T;
  using Stored = T;
  template <class D>
  static HWY_INLINE hn::Vec<D> load([[maybe_unused]] D d, const T* from) {
    return hn::LoadU(d, from);
  }
  template <class D>
  static HWY_INLINE void store([[maybe_unused]] D d, hn::Vec<D> v, T* to) {
    hn::StoreU(v, d, to);
  }
};

struct Bf16 {
  using Sum = float;
  using Stored = uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint16_t* from) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> d16;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, from))));
  }
  template <class D>
  static HWY_INLINE void store([[maybe_unused]] D d, hn::Vec<D> v, uint16_t* to) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> d16;
    const auto bits = hn::BitCast(du, v);
    const auto top = hn::ShiftRight<16>(bits);
    const auto bias = hn::Add(hn::And(top, hn::Set(du, 1)), hn::Set(du, 0x7FFF));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, bias));
    const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));
    const auto quiet = hn::Or(top, hn::Set(du, 0x40));
    hn::StoreU(hn::TruncateTo(d16, hn::IfThenElse(is_nan, quiet, rounded)), d16, to);
  }
};

struct F16 {
  using Sum = float;
  using Stored = uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint16_t* from) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> d16;
    const auto half = hn::PromoteTo(du, hn::LoadU(d16, from));
    const auto size = hn::And(half, hn::Set(du, 0x7FFF));
    const auto sign = hn::ShiftLeft<16>(hn::Xor(half, size));
    const auto moved = hn::ShiftLeft<13>(size);
    const auto normal = hn::Add(moved, hn::Set(du, 112U << 23));
    // Infinity and NaN: the exponent goes from 31 to 255; a NaN becomes quiet.
    const auto quiet = hn::IfThenElseZero(hn::Gt(size, hn::Set(du, 0x7C00)), hn::Set(du, 1U << 22));
    const auto special = hn::Or(hn::Add(moved, hn::Set(du, 224U << 23)), quiet);
    // Denormal: (2^−14 + mantissa × 2^−24) − 2^−14, exact, and no fp32 denormal comes up.
    const auto least = hn::BitCast(d, hn::Set(du, 113U << 23));
    const auto shifted = hn::BitCast(d, hn::Add(moved, hn::Set(du, 113U << 23)));
    const auto denormal = hn::BitCast(du, hn::Sub(shifted, least));
    auto bits = hn::IfThenElse(hn::Lt(size, hn::Set(du, 0x400)), denormal, normal);
    bits = hn::IfThenElse(hn::Gt(size, hn::Set(du, 0x7BFF)), special, bits);
    return hn::BitCast(d, hn::Or(bits, sign));
  }
  template <class D>
  static HWY_INLINE void store([[maybe_unused]] D d, hn::Vec<D> v, uint16_t* to) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> d16;
    const auto bits = hn::BitCast(du, v);
    const auto size = hn::And(bits, hn::Set(du, 0x7FFFFFFF));
    const auto sign = hn::ShiftRight<16>(hn::Xor(bits, size));
    const auto odd = hn::And(hn::ShiftRight<13>(size), hn::Set(du, 1));
    const auto biased = hn::Add(size, hn::Add(odd, hn::Set(du, 0xFFFU - (112U << 23))));
    const auto normal = hn::ShiftRight<13>(biased);
    // Denormal: added to 0.5, whose last place is 2^−24, the processor rounds to nearest even.
    const auto half = hn::Set(du, 126U << 23);
    const auto pushed = hn::Add(hn::BitCast(d, size), hn::BitCast(d, half));
    const auto denormal = hn::Sub(hn::BitCast(du, pushed), half);
    const auto nan =
        hn::Or(hn::Set(du, 0x7E00), hn::And(hn::ShiftRight<13>(size), hn::Set(du, 0x3FF)));
    const auto is_nan = hn::Gt(size, hn::Set(du, 0x7F800000));
    auto result = hn::IfThenElse(hn::Lt(size, hn::Set(du, 0x38800000)), denormal, normal);
    result = hn::IfThenElse(hn::Gt(size, hn::Set(du, 0x477FFFFF)), hn::Set(du, 0x7C00), result);
    result = hn::IfThenElse(is_nan, nan, result);
    hn::StoreU(hn::TruncateTo(d16, hn::Or(result, sign)), d16, to);
  }
};

/// sum + value; where `sum` is NaN it stays, made quiet, whatever `value` is.
template <class D>
HWY_INLINE hn::Vec<D> add_lanes(D d, hn::Vec<D> sum, hn::Vec<D> value) {
  using T = hn::TFromD<D>;
  if constexpr (!hwy::IsFloat<T>())
    return hn::Add(sum, value);
  else {
    const hn::RebindToUnsigned<D> du;
    using U = hn::TFromD<decltype(du)>;
    const auto quiet = hn::BitCast(d, hn::Set(du, U{1} << (sizeof(T) == 4 ? 22 : 51)));
    return hn::IfThenElse(hn::IsNaN(sum), hn::Or(sum, quiet), hn::Add(sum, value));
  }
}

/// Adds elements from `j` on while a whole vector of them is left; returns the first not added.
template <class How, class D>
HWY_INLINE size_t add_span(D d, typename How::Sum* sums, const typename How::Stored* values,
                           size_t j, size_t elems) {
  const size_t lanes = hn::Lanes(d);
  for (; j + lanes <= elems; j += lanes) {
    hn::StoreU(add_lanes(d, hn::LoadU(d, sums + j), How::load(d, values + j)), d, sums + j);
  }
  return j;
}

template <class How>
HWY_NOINLINE void add_wide(typename How::Sum* sums, const uint32_t* at,
                           const typename How::Stored* values, size_t count, size_t width) {
  using Sum = typename How::Sum;
  constexpr size_t kAhead = 4;       // rows; a row's sums come in while four others are added
  constexpr size_t kLinesAhead = 4;  // the rest of a long row is the hardware's to see
  constexpr size_t kLineElems = 64 / sizeof(Sum);
  const size_t fetch_elems = HWY_MIN(width, kLinesAhead * kLineElems);
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const Sum* ahead = sums + size_t{at[i + kAhead]} * width;
      for (size_t j = 0; j < fetch_elems; j += kLineElems) hwy::Prefetch(ahead + j);
    }
    Sum* row = sums + size_t{at[i]} * width;
    const auto* value = values + i * width;
    size_t j = add_span<How>(hn::ScalableTag<Sum>(), row, value, 0, width);
    j = add_span<How>(hn::CappedTag<Sum, 8>(), row, value, j, width);
    j = add_span<How>(hn::CappedTag<Sum, 4>(), row, value, j, width);
    add_span<How>(hn::CappedTag<Sum, 1>(), row, value, j, width);
  }
}

template <class Sum>
HWY_INLINE void add_one(Sum& sum, Sum value) {
  if constexpr (hwy::IsFloat<Sum>()) {
    if (HWY_UNLIKELY(sum != sum)) {
      const hn::CappedTag<Sum, 1> d;
      hn::StoreU(add_lanes(d, hn::LoadU(d, &sum), hn::Set(d, value)), d, &sum);
      return;
    }
  }
  sum = sum + value;
}

/// Units of one element: widened in blocks, then added one by one, since a position may come twice.
template <class How>
HWY_NOINLINE void add_singles(typename How::Sum* sums, const uint32_t* at,
                              const typename How::Stored* values, size_t count) {
  using Sum = typename How::Sum;
  constexpr size_t kAhead = 32;
  constexpr size_t kBlock = 256;
  constexpr bool kIsPlain = std::is_same<Sum, typename How::Stored>::value;
  Sum widened[kIsPlain ? 1 : kBlock];
  for (size_t block = 0; block < count; block += kBlock) {
    const size_t block_count = HWY_MIN(kBlock, count - block);
    const Sum* value = widened;
    if constexpr (kIsPlain) {
      value = values + block;
    } else {
      const hn::CappedTag<Sum, 16> d;
      const hn::CappedTag<Sum, 1> d1;
      size_t i = 0;
      for (; i + hn::Lanes(d) <= block_count; i += hn::Lanes(d)) {
        hn::StoreU(How::load(d, values + block + i), d, widened + i);
      }
      for (; i < block_count; ++i) hn::StoreU(How::load(d1, values + block + i), d1, widened + i);
    }
    const uint32_t* position = at + block;
    const size_t fetched = HWY_MIN(block_count, count - HWY_MIN(count, block + kAhead));
    size_t i = 0;
    for (; i < fetched; ++i) {
      hwy::Prefetch(sums + position[i + kAhead]);
      add_one(sums[position[i]], value[i]);
    }
    for (; i < block_count; ++i) add_one(sums[position[i]], value[i]);
  }
}

template <class How>
void add_any(void* sums, const uint32_t* at, const void* values, size_t count, size_t width) {
  auto* sum = static_cast<typename How::Sum*>(sums);
  const auto* value = static_cast<const typename How::Stored*>(values);
  if (width == 1) return add_singles<How>(sum, at, value, count);
  add_wide<How>(sum, at, value, count, width);
}

void add_units(void* sums, const uint32_t* at, const void* values, size_t count, size_t width,
               DType values_dtype) {
  const ScopedExactFloats exact;
  switch (values_dtype) {
    case DType::kF32:
      return add_any<Plain<float>>(sums, at, values, count, width);
    case DType::kF64:
      return add_any<Plain<double>>(sums, at, values, count, width);
    case DType::kBF16:
      return add_any<Bf16>(sums, at, values, count, width);
    case DType::kF16:
      return add_any<F16>(sums, at, values, count, width);
    case DType::kI32:
      return add_any<Plain<uint32_t>>(sums, at, values, count, width);
    case DType::kI64:
      return add_any<Plain<uint64_t>>(sums, at, values, count, width);
  }
}

/// As add_span: rounds sums, after a division where `kDivide`.
template <class How, bool kDivide, class D>
HWY_INLINE size_t finish_span(D d, const typename How::Sum* sums, typename How::Stored* out,
                              size_t i, size_t elems, typename How::Sum divisor) {
  const size_t lanes = hn::Lanes(d);
  const auto by = hn::Set(d, divisor);
  for (; i + lanes <= elems; i += lanes) {
    auto v = hn::LoadU(d, sums + i);
    if constexpr (kDivide) v = hn::Div(v, by);
    How::store(d, v, out + i);
  }
  return i;
}

template <class How, bool kDivide>
HWY_NOINLINE void finish_any(const void* sums, void* out, size_t elems, double divisor) {
  using Sum = typename How::Sum;
  const auto* sum = static_cast<const Sum*>(sums);
  auto* result = static_cast<typename How::Stored*>(out);
  const auto by = static_cast<Sum>(divisor);
  const size_t i = finish_span<How, kDivide>(hn::ScalableTag<Sum>(), sum, result, 0, elems, by);
  finish_span<How, kDivide>(hn::CappedTag<Sum, 1>(), sum, result, i, elems, by);
}

void finish(const void* sums, void* out, size_t elems, DType out_dtype, double divisor) {
  const ScopedExactFloats exact;
  const bool divide = divisor != 1.0;
  if (out_dtype == DType::kBF16) {
    return divide ? finish_any<Bf16, true>(sums, out, elems, divisor)
                  : finish_any<Bf16, false>(sums, out, elems, divisor);
  }
  if (out_dtype == DType::kF16) {
    return divide ? finish_any<F16, true>(sums, out, elems, divisor)
                  : finish_any<F16, false>(sums, out, elems, divisor);
  }
  if (divide && out_dtype == DType::kF32) {
    return finish_any<Plain<float>, true>(sums, out, elems, divisor);
  }
  if (divide && out_dtype == DType::kF64) {
    return finish_any<Plain<double>, true>(sums, out, elems, divisor);
  }
  if (out != sums && elems != 0) std::memcpy(out, sums, elems * dtype_bytes(out_dtype));
}

}  // namespace HWY_NAMESPACE
}  // namespace zensync::kernels
HWY_AFTER_NAMESPACE();

#endif
