// What a connection of the native mesh delivers: prefixes, aborts, hellos, beats, and the walk that
// looks for an abort. Place: fuzz. Input: a byte that picks one of them, then its bytes.
// Properties: what is decoded is encoded as the same bytes (texts as long as they are not cut);
// the walk finds the same however its stream is cut, and the same as an obvious walk does.
#include <algorithm>

#include "target.hpp"
#include "wire.hpp"

namespace zensync::fuzz {
namespace {

using namespace driver;  // NOLINT(google-build-using-namespace): what is tested

bool equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

bool same(const std::optional<Error>& a, const std::optional<Error>& b) {
  if (!a || !b) return a.has_value() == b.has_value();
  return a->kind == b->kind && a->message == b->message && a->rank == b->rank &&
         a->culprit == b->culprit && a->tensor == b->tensor;
}

void run_prefix(std::span<const std::byte> bytes) {
  if (bytes.size() < kPrefixBytes) return;
  const ExactBytes exact(bytes.first(kPrefixBytes));
  const FramePrefix prefix = decode_prefix(ExactBytes(bytes.first(kPrefixBytes)).bytes().data());
  const auto again = encode_prefix(static_cast<FrameKind>(prefix.kind), prefix.length_bytes);
  require(equal(again, bytes.first(kPrefixBytes)), "a prefix comes back");
}

void run_abort(std::span<const std::byte> bytes) {
  ExactBytes exact(bytes);
  const auto error = decode_abort(exact.bytes());
  if (!error) return;
  const auto frame = encode_abort(*error);
  require(frame.size() <= kPrefixBytes + kMaxAbortBytes, "an abort is no longer than allowed");
  const auto payload = std::span(frame).subspan(kPrefixBytes);
  const auto back = decode_abort(payload);
  require(back.has_value(), "an abort that was written again can be read");
  require(back->kind == error->kind && back->rank == error->rank && back->culprit == error->culprit,
          "an abort keeps who and what");
  if (back->tensor == error->tensor) require(equal(payload, bytes), "an abort comes back");
  require(error->tensor.starts_with(back->tensor), "a long name is cut, not changed");
  note_accepted();
}

void run_hello(std::span<const std::byte> bytes) {
  HelloBytes hello_bytes{};
  std::copy_n(bytes.begin(), std::min(bytes.size(), kHelloBytes), hello_bytes.begin());
  const auto hello = decode_hello(hello_bytes);
  if (!hello) return;
  const HelloBytes again = encode_hello(*hello);
  // Of another byte order only that is known; its version reads as 0.
  require(hello->version == 0 || equal(again, hello_bytes), "a hello comes back");
  require(equal_tokens(hello->token, hello->token), "a token equals itself");
  note_accepted();
}

void run_beat(std::span<const std::byte> bytes) {
  ExactBytes exact(bytes);
  const auto progress = decode_beat(exact.bytes());
  if (!progress) return;
  const BeatBytes again = encode_beat(*progress);
  require(equal(std::span(again).subspan(kPrefixBytes), bytes), "a beat comes back");
  note_accepted();
}

/// What `AbortFinder` is to find, from the whole stream at once; `ended`: the walk stops there.
std::optional<Error> obvious_abort(std::uint64_t skip, std::span<const std::byte> stream,
                                   bool& ended) {
  ended = false;
  for (;;) {
    if (skip > stream.size()) return {};
    stream = stream.subspan(static_cast<std::size_t>(skip));
    if (stream.size() < kPrefixBytes) return {};
    const FramePrefix prefix = decode_prefix(stream.data());
    stream = stream.subspan(kPrefixBytes);
    if (prefix.kind == static_cast<std::uint16_t>(FrameKind::kAbort)) {
      const bool too_long = prefix.length_bytes > kMaxAbortBytes || prefix.length_bytes == 0;
      ended = too_long || prefix.length_bytes <= stream.size();
      if (too_long || !ended) return {};
      return decode_abort(stream.first(static_cast<std::size_t>(prefix.length_bytes)));
    }
    ended = prefix.kind != static_cast<std::uint16_t>(FrameKind::kData);
    if (ended) return {};
    skip = prefix.length_bytes;
  }
}

void run_finder(std::span<const std::byte> bytes) {
  Input input(bytes);
  const auto skip = input.take<std::uint8_t>();
  const std::size_t step = 1 + input.take<std::uint8_t>();
  const auto stream = input.rest();
  bool want_end = false;
  const auto want = obvious_abort(skip, stream, want_end);
  AbortFinder finder(skip);
  bool done = false;
  for (std::size_t at = 0; at < stream.size(); at += step) {
    ExactBytes part(stream.subspan(at, std::min(step, stream.size() - at)));
    const bool now = finder.feed(part.bytes());
    require(now || !done, "a walk that has ended stays at its end");
    done = now;
  }
  require(done == want_end, "the walk ends where it should");
  require(same(finder.found(), want), "the walk finds what is there");
  if (want) note_accepted();
}

Error sample(std::size_t length) {
  return Error{ErrorKind::kMismatch, std::string(length, 'm'), Rank{7}, Rank{-1},
               std::string(length / 2, 't')};
}

Bytes with_choice(std::uint8_t choice, std::span<const std::byte> bytes) {
  Bytes all;
  put(all, choice);
  return put_bytes(all, bytes);
}

}  // namespace

void run_frames(std::span<const std::byte> bytes) {
  Input input(bytes);
  switch (input.take<std::uint8_t>() % 5) {
    case 0:
      return run_prefix(input.rest());
    case 1:
      return run_abort(input.rest());
    case 2:
      return run_hello(input.rest());
    case 3:
      return run_beat(input.rest());
    default:
      return run_finder(input.rest());
  }
}

Corpus frame_seeds() {
  Corpus corpus;
  for (const std::uint64_t length : {0ULL, 1ULL, (1ULL << 48) - 1}) {
    corpus.push_back(with_choice(0, encode_prefix(FrameKind::kAbort, length)));
  }
  for (const std::size_t length : {0, 20, 9000}) {
    const auto frame = encode_abort(sample(length));
    corpus.push_back(with_choice(1, std::span(frame).subspan(kPrefixBytes)));
  }
  Hello hello;
  hello.size = 5;
  hello.rank = 3;
  corpus.push_back(with_choice(2, encode_hello(hello)));
  const BeatBytes beat = encode_beat({5, 4, 1, 9});
  corpus.push_back(with_choice(3, std::span(beat).subspan(kPrefixBytes)));
  for (const std::uint8_t step : {0, 6, 255}) {
    Bytes stream;
    put(stream, std::uint8_t{20});
    put(stream, step);
    stream.resize(stream.size() + 20);
    for (const std::size_t length : {0, 3, 40}) {
      put_bytes(stream, encode_prefix(FrameKind::kData, length));
      stream.resize(stream.size() + length, std::byte{0xEE});
    }
    put_bytes(stream, encode_abort(sample(12)));
    corpus.push_back(with_choice(4, stream));
    put_bytes(stream, encode_prefix(FrameKind::kGoodbye, 0));
    corpus.push_back(with_choice(4, stream));
  }
  return corpus;
}

}  // namespace zensync::fuzz
