// Reference kernels that move units: `gather` and `scatter`. Place: kernels, private.
// The caller has checked that each position lies inside `base`; a position may be met more than
// once (the last one wins in `scatter`). `base` and the units handed over do not overlap. Nothing
// can fail.
#include <cstring>

#include "ref/ref.hpp"

namespace zensync::kernels::ref {

void gather(const void* base, const std::uint32_t* at, std::size_t count, std::size_t unit_bytes,
            void* out) {
  const auto* from = static_cast<const std::byte*>(base);
  auto* to = static_cast<std::byte*>(out);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t place = static_cast<std::size_t>(at[i]) * unit_bytes;
    std::memcpy(to + i * unit_bytes, from + place, unit_bytes);
  }
}

void scatter(void* base, const std::uint32_t* at, std::size_t count, std::size_t unit_bytes,
             const void* in) {
  auto* to = static_cast<std::byte*>(base);
  const auto* from = static_cast<const std::byte*>(in);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t place = static_cast<std::size_t>(at[i]) * unit_bytes;
    std::memcpy(to + place, from + i * unit_bytes, unit_bytes);
  }
}

}  // namespace zensync::kernels::ref
