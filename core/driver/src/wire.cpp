// Encoding and decoding of what the native mesh puts on the wire (prefix, abort, hello).
// Place: driver, level 4, private. Pure functions; memory belongs to the caller. Written byte by
// byte with shifts, so the format does not depend on the machine. Decoders refuse whatever does not
// fit exactly; they are fed with bytes of strangers.
#include "wire.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>

namespace zensync::driver {
namespace {

constexpr std::uint64_t kMagic = 0x314E59534E455A97ULL;  // 0x97 "ZENSYN1": no text starts like this
constexpr int kLengthBits = 48;
constexpr std::uint64_t kLengthMask = (std::uint64_t{1} << kLengthBits) - 1;
constexpr std::size_t kAbortHeadBytes = 20;  // kind, rank, culprit, two lengths

template <class T>
void put(std::byte*& at, T value) {
  auto bits = static_cast<std::uint64_t>(value);
  for (std::size_t i = 0; i < sizeof(T); ++i, bits >>= 8)
    *at++ = static_cast<std::byte>(bits & 255);
}

template <class T>
T take(const std::byte*& at) {
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) bits |= static_cast<std::uint64_t>(*at++) << (8 * i);
  return static_cast<T>(bits);
}

std::uint32_t endianness_mark() {
  // In memory 01 02 03 04 everywhere, so as a number it shows which kind of machine this is.
  std::uint32_t mark = 0;
  constexpr unsigned char kBytes[4] = {1, 2, 3, 4};
  std::memcpy(&mark, kBytes, sizeof mark);
  return mark;
}

}  // namespace

const char* native_endianness() {
  return std::endian::native == std::endian::little ? "little" : "big";
}

PrefixBytes encode_prefix(FrameKind kind, std::uint64_t length_bytes) {
  PrefixBytes bytes;
  std::byte* at = bytes.data();
  put(at, (static_cast<std::uint64_t>(kind) << kLengthBits) | (length_bytes & kLengthMask));
  return bytes;
}

FramePrefix decode_prefix(const std::byte* bytes) {
  const auto word = take<std::uint64_t>(bytes);
  return {static_cast<std::uint16_t>(word >> kLengthBits), word & kLengthMask};
}

std::vector<std::byte> encode_abort(const Error& error) {
  const std::size_t room_bytes = kMaxAbortBytes - kAbortHeadBytes;
  const auto tensor = std::string_view(error.tensor).substr(0, room_bytes / 2);
  const auto message = std::string_view(error.message).substr(0, room_bytes - tensor.size());
  const std::size_t payload_bytes = kAbortHeadBytes + tensor.size() + message.size();
  std::vector<std::byte> bytes(kPrefixBytes + payload_bytes);
  const PrefixBytes prefix = encode_prefix(FrameKind::kAbort, payload_bytes);
  std::byte* at = std::copy(prefix.begin(), prefix.end(), bytes.data());
  put(at, static_cast<std::uint32_t>(error.kind));
  put(at, static_cast<std::int32_t>(error.rank.value));
  put(at, static_cast<std::int32_t>(error.culprit.value));
  put(at, static_cast<std::uint32_t>(tensor.size()));
  put(at, static_cast<std::uint32_t>(message.size()));
  for (const char c : tensor) *at++ = static_cast<std::byte>(c);
  for (const char c : message) *at++ = static_cast<std::byte>(c);
  return bytes;
}

std::optional<Error> decode_abort(std::span<const std::byte> payload) {
  if (payload.size() < kAbortHeadBytes || payload.size() > kMaxAbortBytes) return {};
  const std::byte* at = payload.data();
  const auto kind = take<std::uint32_t>(at);
  Error error;
  error.rank.value = take<std::int32_t>(at);
  error.culprit.value = take<std::int32_t>(at);
  const std::size_t tensor_bytes = take<std::uint32_t>(at);
  const std::size_t message_bytes = take<std::uint32_t>(at);
  if (kind > static_cast<std::uint32_t>(ErrorKind::kInternal)) return {};
  if (tensor_bytes > kMaxAbortBytes || message_bytes > kMaxAbortBytes) return {};
  if (kAbortHeadBytes + tensor_bytes + message_bytes != payload.size()) return {};
  error.kind = static_cast<ErrorKind>(kind);
  const auto* text = reinterpret_cast<const char*>(at);
  error.tensor.assign(text, tensor_bytes);
  error.message.assign(text + tensor_bytes, message_bytes);
  return error;
}

BeatBytes encode_beat(const Progress& progress) {
  BeatBytes bytes;
  const PrefixBytes prefix = encode_prefix(FrameKind::kBeat, kBeatBytes - kPrefixBytes);
  std::byte* at = std::copy(prefix.begin(), prefix.end(), bytes.data());
  put(at, progress.jobs_begun);
  put(at, progress.jobs_done);
  put(at, progress.dense_begun);
  put(at, progress.exchange);
  return bytes;
}

std::optional<Progress> decode_beat(std::span<const std::byte> payload) {
  if (payload.size() != kBeatBytes - kPrefixBytes) return {};
  const std::byte* at = payload.data();
  Progress progress;
  progress.jobs_begun = take<std::uint64_t>(at);
  progress.jobs_done = take<std::uint64_t>(at);
  progress.dense_begun = take<std::uint64_t>(at);
  progress.exchange = take<std::uint32_t>(at);
  return progress;
}

HelloBytes encode_hello(const Hello& hello) {
  HelloBytes bytes;
  std::byte* at = bytes.data();
  put(at, kMagic);
  put(at, hello.version);
  put(at, endianness_mark());
  put(at, hello.size);
  put(at, hello.rank);
  at = std::copy(hello.token.begin(), hello.token.end(), at);
  put(at, hello.settings_digest);
  put(at, hello.host_digest);
  return bytes;
}

std::optional<Hello> decode_hello(const HelloBytes& bytes) {
  const std::byte* at = bytes.data();
  if (take<std::uint64_t>(at) != kMagic) return {};
  Hello hello;
  hello.version = take<std::uint32_t>(at);
  // A machine of the other kind speaks another format: no version that this one knows.
  if (take<std::uint32_t>(at) != endianness_mark()) hello.version = 0;
  hello.size = take<std::int32_t>(at);
  hello.rank = take<std::int32_t>(at);
  std::copy_n(at, kTokenBytes, hello.token.begin());
  at += kTokenBytes;
  hello.settings_digest = take<std::uint64_t>(at);
  hello.host_digest = take<std::uint64_t>(at);
  return hello;
}

bool equal_tokens(const Token& a, const Token& b) {
  unsigned differing = 0;
  for (std::size_t i = 0; i < kTokenBytes; ++i) {
    differing |= static_cast<unsigned>(a[i]) ^ static_cast<unsigned>(b[i]);
  }
  return differing == 0;
}

bool AbortFinder::feed(std::span<const std::byte> bytes) {
  while (!bytes.empty() && want_bytes_ != 0) {
    if (skip_bytes_ != 0) {
      const auto skipped = std::min<std::uint64_t>(skip_bytes_, bytes.size());
      skip_bytes_ -= skipped;
      bytes = bytes.subspan(static_cast<std::size_t>(skipped));
      continue;
    }
    const std::size_t count = std::min(want_bytes_ - kept_.size(), bytes.size());
    kept_.insert(kept_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count));
    bytes = bytes.subspan(count);
    if (kept_.size() == want_bytes_ && end_of_frame()) want_bytes_ = 0;
  }
  return want_bytes_ == 0;
}

bool AbortFinder::end_of_frame() {
  if (in_abort_) {
    found_ = decode_abort(kept_);
    return true;
  }
  const FramePrefix prefix = decode_prefix(kept_.data());
  kept_.clear();
  if (prefix.kind == static_cast<std::uint16_t>(FrameKind::kAbort)) {
    if (prefix.length_bytes > kMaxAbortBytes || prefix.length_bytes == 0) return true;
    in_abort_ = true;
    want_bytes_ = static_cast<std::size_t>(prefix.length_bytes);
    return false;
  }
  if (prefix.kind != static_cast<std::uint16_t>(FrameKind::kData)) return true;
  skip_bytes_ = prefix.length_bytes;
  return false;
}

}  // namespace zensync::driver
