// The version of everything that ranks send each other: handshake, frames, headers, codecs.
// Place: base, level 0, so that driver and codec share it.
// Raised with any change of a byte that is sent. The handshake refuses peers of another version
// (kMismatch), and so does the reader of messages (kCorruptMessage).
// A constant: no memory, no threads, nothing can fail.
#pragma once

#include <cstdint>

namespace zensync {

inline constexpr std::uint8_t kWireVersion = 1;

}  // namespace zensync
