// Reference kernels that compute: `add_units` and `finish`, and the table called "ref".
// Place: kernels, private. DAZ and FTZ are cleared while adding and dividing, whatever the thread
// has set. NaN: where the accumulator is NaN it wins (made quiet), else the processor's rule for
// one NaN operand; this makes the bits independent of the order in which a compiler hands operands
// to the processor. Integers wrap. Nothing here can fail.
#include <cstring>
#include <type_traits>

#include "ref/half.hpp"
#include "ref/ref.hpp"
#include "zensync/base/fp_env.hpp"

namespace zensync::kernels::ref {
namespace {

float add_value(float sum, float value) {
  if (sum != sum) return std::bit_cast<float>(std::bit_cast<std::uint32_t>(sum) | (1U << 22));
  return sum + value;
}

double add_value(double sum, double value) {
  if (sum != sum) return std::bit_cast<double>(std::bit_cast<std::uint64_t>(sum) | (1ULL << 51));
  return sum + value;
}

std::uint32_t add_value(std::uint32_t sum, std::uint32_t value) { return sum + value; }
std::uint64_t add_value(std::uint64_t sum, std::uint64_t value) { return sum + value; }

template <class T>
T as_is(T value) {
  return value;
}

template <class Sum, class Value, class Widen>
void add_all(void* sums, const std::uint32_t* at, const void* values, std::size_t count,
             std::size_t width, Widen widen) {
  auto* sum = static_cast<Sum*>(sums);
  const auto* value = static_cast<const Value*>(values);
  for (std::size_t i = 0; i < count; ++i) {
    Sum* row = sum + static_cast<std::size_t>(at[i]) * width;
    for (std::size_t j = 0; j < width; ++j) row[j] = add_value(row[j], widen(value[i * width + j]));
  }
}

template <class Sum, class Out, class Round>
void finish_all(const void* sums, void* out, std::size_t elems, double divisor, Round round) {
  const auto* sum = static_cast<const Sum*>(sums);
  auto* result = static_cast<Out*>(out);
  const auto by = static_cast<Sum>(divisor);
  for (std::size_t i = 0; i < elems; ++i) result[i] = round(divisor == 1.0 ? sum[i] : sum[i] / by);
}

}  // namespace

void add_units(void* sums, const std::uint32_t* at, const void* values, std::size_t count,
               std::size_t width, DType values_dtype) {
  const ScopedExactFloats exact;
  using U16 = std::uint16_t;
  using U32 = std::uint32_t;
  using U64 = std::uint64_t;
  switch (values_dtype) {
    case DType::kF32:
      return add_all<float, float>(sums, at, values, count, width, as_is<float>);
    case DType::kF64:
      return add_all<double, double>(sums, at, values, count, width, as_is<double>);
    case DType::kBF16:
      return add_all<float, U16>(sums, at, values, count, width, widen_bf16);
    case DType::kF16:
      return add_all<float, U16>(sums, at, values, count, width, widen_f16);
    case DType::kI32:
      return add_all<U32, U32>(sums, at, values, count, width, as_is<U32>);
    case DType::kI64:
      return add_all<U64, U64>(sums, at, values, count, width, as_is<U64>);
  }
}

void finish(const void* sums, void* out, std::size_t elems, DType out_dtype, double divisor) {
  const ScopedExactFloats exact;
  switch (out_dtype) {
    case DType::kF32:
      return finish_all<float, float>(sums, out, elems, divisor, as_is<float>);
    case DType::kF64:
      return finish_all<double, double>(sums, out, elems, divisor, as_is<double>);
    case DType::kBF16:
      return finish_all<float, std::uint16_t>(sums, out, elems, divisor, round_bf16);
    case DType::kF16:
      return finish_all<float, std::uint16_t>(sums, out, elems, divisor, round_f16);
    case DType::kI32:
    case DType::kI64:
      if (out != sums && elems != 0) std::memcpy(out, sums, elems * dtype_bytes(out_dtype));
      return;
  }
}

}  // namespace zensync::kernels::ref

namespace zensync::kernels {

const Table kRefTable = {
    .name = "ref",
    .find_units = ref::find_units,
    .count_nonzero = ref::count_nonzero,
    .add_units = ref::add_units,
    .finish = ref::finish,
    .gather = ref::gather,
    .scatter = ref::scatter,
    .pack_bitmap = ref::pack_bitmap,
    .unpack_bitmap = ref::unpack_bitmap,
    .pack_elias_fano = ref::pack_elias_fano,
    .unpack_elias_fano = ref::unpack_elias_fano,
};

}  // namespace zensync::kernels
