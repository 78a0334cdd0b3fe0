// Hashing: the 64-bit mix behind the rotation, keys of tensors, digests of messages.
// Place: base, level 0. Pure functions over the caller's bytes; any thread; nothing can fail.
// Digests and keys are XXH3-64 with seed 0 (xxHash). `mix64` is one step of SplitMix64 (Steele,
// Lea, Flood, OOPSLA'14), written out because its bits are part of the wire format.
// Nothing here is cryptographic: it finds accidents, not attacks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace zensync {

constexpr std::uint64_t mix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

/// XXH3-64 of `size_bytes` bytes, seed 0.
std::uint64_t digest64(const void* data, std::size_t size_bytes);

/// Key of a tensor's name; never 0.
std::uint64_t key_of(std::string_view name);

}  // namespace zensync
