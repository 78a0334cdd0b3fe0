// Reference kernels that look for what is not zero: `find_units` and `count_nonzero`.
// Place: kernels, private. Elements are read as unsigned integers, so that denormals count whatever
// DAZ says. `find_units` writes +0.0 over each −0.0 of the caller's memory. Nothing here can fail.
#include <cstring>

#include "ref/ref.hpp"

namespace zensync::kernels::ref {
namespace {

/// Bits of one element that make it non-zero: all but the sign for floats, all for integers.
std::uint64_t value_mask(DType dtype) {
  const unsigned bits = static_cast<unsigned>(dtype_bytes(dtype)) * 8;
  const std::uint64_t all = ~std::uint64_t{0} >> (64 - bits);
  return is_float(dtype) ? all >> 1 : all;
}

std::uint64_t load_bits(const std::byte* at, std::size_t elem_bytes) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, at, elem_bytes);
  return bits;
}

}  // namespace

std::size_t find_units(void* data, std::size_t units, std::size_t width, DType dtype,
                       std::uint32_t* out) {
  const std::size_t elem_bytes = dtype_bytes(dtype);
  const std::uint64_t mask = value_mask(dtype);
  auto* at = static_cast<std::byte*>(data);
  std::size_t found = 0;
  for (std::size_t unit = 0; unit < units; ++unit) {
    bool nonzero = false;
    for (std::size_t j = 0; j < width; ++j, at += elem_bytes) {
      const std::uint64_t bits = load_bits(at, elem_bytes);
      if ((bits & mask) != 0) {
        nonzero = true;
      } else if (bits != 0) {
        std::memset(at, 0, elem_bytes);
      }
    }
    if (nonzero) out[found++] = static_cast<std::uint32_t>(unit);
  }
  return found;
}

std::uint64_t count_nonzero(const void* data, std::size_t elems, DType dtype) {
  const std::size_t elem_bytes = dtype_bytes(dtype);
  const std::uint64_t mask = value_mask(dtype);
  const auto* at = static_cast<const std::byte*>(data);
  std::uint64_t count = 0;
  for (std::size_t i = 0; i < elems; ++i, at += elem_bytes) {
    count += (load_bits(at, elem_bytes) & mask) != 0 ? 1 : 0;
  }
  return count;
}

}  // namespace zensync::kernels::ref
