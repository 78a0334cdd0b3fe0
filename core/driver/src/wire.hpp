// What the native mesh puts on the wire: frame prefixes, the bytes of an abort, the hello of a
// handshake. Place: driver, level 4, private. Pure functions over bytes; nothing here owns memory
// of others or does I/O. All integers are little-endian. Bytes from elsewhere are checked before
// they are used: decoders answer with an empty optional, never with half a value.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "watch.hpp"
#include "zensync/base/result.hpp"
#include "zensync/base/wire_version.hpp"
#include "zensync/scheme/exchange.hpp"

namespace zensync::driver {

enum class FrameKind : std::uint16_t {
  kData = 0,
  kAbort = 1,    ///< the payload is an encoded Error; nothing follows
  kGoodbye = 2,  ///< no payload; the sender closes in good order, its end is no fault
  kBeat = 3,     ///< control connections: the sender's Progress
};

struct FramePrefix {
  std::uint16_t kind = 0;  ///< as received: may be no FrameKind
  std::uint64_t length_bytes = 0;
};

inline constexpr std::size_t kPrefixBytes = kFramePrefixBytes;
using PrefixBytes = std::array<std::byte, kPrefixBytes>;

PrefixBytes encode_prefix(FrameKind kind, std::uint64_t length_bytes);
/// `bytes` holds at least kPrefixBytes.
FramePrefix decode_prefix(const std::byte* bytes);

/// Longest payload of an abort; longer texts are cut when encoded.
inline constexpr std::size_t kMaxAbortBytes = 8192;
std::vector<std::byte> encode_abort(const Error& error);  ///< prefix included
std::optional<Error> decode_abort(std::span<const std::byte> payload);

/// A heartbeat, prefix included.
inline constexpr std::size_t kBeatBytes = kPrefixBytes + 3 * 8 + 4;
using BeatBytes = std::array<std::byte, kBeatBytes>;
BeatBytes encode_beat(const Progress& progress);
std::optional<Progress> decode_beat(std::span<const std::byte> payload);

inline constexpr std::size_t kTokenBytes = 16;
using Token = std::array<std::byte, kTokenBytes>;

/// What two ranks tell each other first.
struct Hello {
  std::uint32_t version = kWireVersion;
  std::int32_t size = 0;
  std::int32_t rank = -1;
  Token token{};
  std::uint64_t settings_digest = 0;
  std::uint64_t host_digest = 0;
};

inline constexpr std::size_t kHelloBytes = 8 + 4 + 4 + 4 + 4 + kTokenBytes + 8 + 8;
using HelloBytes = std::array<std::byte, kHelloBytes>;

HelloBytes encode_hello(const Hello& hello);
/// Empty unless it starts with our magic.
std::optional<Hello> decode_hello(const HelloBytes& bytes);

/// Takes the same time wherever the tokens differ.
bool equal_tokens(const Token& a, const Token& b);

/// "little" or "big": of the values inside messages, which travel as they lie in memory.
const char* native_endianness();

/// Walks over frames without keeping them and stops at an abort: for connections that end while
/// messages nobody asked for are still in front of the reason.
class AbortFinder {
 public:
  /// `skip_bytes`: rest of the payload in which the bytes to come start.
  explicit AbortFinder(std::uint64_t skip_bytes) : skip_bytes_(skip_bytes) {}
  /// Goes on with these bytes; true when the walk has ended (`found` has the abort, if there was
  /// one).
  bool feed(std::span<const std::byte> bytes);
  const std::optional<Error>& found() const { return found_; }

 private:
  bool end_of_frame();

  std::uint64_t skip_bytes_;
  std::vector<std::byte> kept_;  // a prefix, or the payload of an abort
  std::size_t want_bytes_ = kPrefixBytes;
  bool in_abort_ = false;
  std::optional<Error> found_;
};

}  // namespace zensync::driver
