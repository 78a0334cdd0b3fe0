// Hashing through xxHash, compiled in (header-only). Place: base, level 0.
// Pure functions; nothing can fail.
#include "zensync/base/hash.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zensync {

std::uint64_t digest64(const void* data, std::size_t size_bytes) {
  return XXH3_64bits(data, size_bytes);
}

std::uint64_t key_of(std::string_view name) {
  const std::uint64_t key = XXH3_64bits(name.data(), name.size());
  return key == 0 ? 1 : key;
}

}  // namespace zensync
