// The bytes of the native mesh: they come back as they went, and bytes that are none are refused.
// Place: tests of driver; pure functions, no sockets.
#include <gtest/gtest.h>

#include "messages.hpp"
#include "wire.hpp"

namespace zensync::driver {
namespace {

std::span<const std::byte> payload_of(const std::vector<std::byte>& frame) {
  return std::span(frame).subspan(kPrefixBytes);
}

const Error kSample{ErrorKind::kCapacity, "too little memory", Rank{7}, Rank{-1}, "table"};

TEST(Wire, PrefixIsLittleEndianWithTheKindOnTop) {
  const PrefixBytes bytes = encode_prefix(FrameKind::kAbort, 0x0000A1B2C3D4E5F6ULL);
  const unsigned char want[8] = {0xF6, 0xE5, 0xD4, 0xC3, 0xB2, 0xA1, 1, 0};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(std::to_integer<int>(bytes[std::size_t(i)]), want[i]);
  const FramePrefix prefix = decode_prefix(bytes.data());
  EXPECT_EQ(prefix.kind, 1);
  EXPECT_EQ(prefix.length_bytes, 0x0000A1B2C3D4E5F6ULL);
}

TEST(Wire, AbortsComeBack) {
  const auto frame = encode_abort(kSample);
  EXPECT_EQ(decode_prefix(frame.data()).length_bytes, frame.size() - kPrefixBytes);
  const auto back = decode_abort(payload_of(frame));
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->kind, kSample.kind);
  EXPECT_EQ(back->message, kSample.message);
  EXPECT_EQ(back->rank, kSample.rank);
  EXPECT_EQ(back->culprit, kSample.culprit);
  EXPECT_EQ(back->tensor, kSample.tensor);
}

TEST(Wire, LongTextsAreCut) {
  Error error = kSample;
  error.tensor.assign(20000, 't');
  error.message.assign(20000, 'm');
  const auto frame = encode_abort(error);
  EXPECT_LE(frame.size(), kPrefixBytes + kMaxAbortBytes);
  const auto back = decode_abort(payload_of(frame));
  ASSERT_TRUE(back.has_value());
  EXPECT_GT(back->message.size(), 1000U);
  EXPECT_GT(back->tensor.size(), 1000U);
}

TEST(Wire, BrokenAbortsAreRefused) {
  const auto frame = encode_abort(kSample);
  for (std::size_t size = 0; size + 1 < frame.size() - kPrefixBytes; ++size) {
    EXPECT_FALSE(decode_abort(payload_of(frame).first(size)).has_value());
  }
  auto longer = frame;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(decode_abort(payload_of(longer)).has_value());
  auto kind = frame;
  kind[kPrefixBytes] = std::byte{200};
  EXPECT_FALSE(decode_abort(payload_of(kind)).has_value());
  auto length = frame;
  length[kPrefixBytes + 15] = std::byte{255};  // a tensor's name of 4 GB
  EXPECT_FALSE(decode_abort(payload_of(length)).has_value());
}

TEST(Wire, BeatsAreLittleEndianAndComeBack) {
  Progress progress;
  progress.jobs_begun = 0x0807060504030201ULL;
  progress.jobs_done = 0x100F0E0D0C0B0A09ULL;
  progress.dense_begun = 0x1817161514131211ULL;
  progress.exchange = 0x1C1B1A19;
  const BeatBytes bytes = encode_beat(progress);
  const FramePrefix prefix = decode_prefix(bytes.data());
  EXPECT_EQ(prefix.kind, static_cast<std::uint16_t>(FrameKind::kBeat));
  EXPECT_EQ(prefix.kind, 3);
  EXPECT_EQ(prefix.length_bytes, kBeatBytes - kPrefixBytes);
  for (std::size_t i = 0; i < kBeatBytes - kPrefixBytes; ++i) {
    EXPECT_EQ(std::to_integer<std::size_t>(bytes[kPrefixBytes + i]), i + 1);
  }
  const auto back = decode_beat(std::span(bytes).subspan(kPrefixBytes));
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->jobs_begun, progress.jobs_begun);
  EXPECT_EQ(back->jobs_done, progress.jobs_done);
  EXPECT_EQ(back->dense_begun, progress.dense_begun);
  EXPECT_EQ(back->exchange, progress.exchange);
}

TEST(Wire, BeatsOfAnotherLengthAreRefused) {
  const std::vector<std::byte> bytes(2 * kBeatBytes);
  for (std::size_t size = 0; size <= bytes.size(); ++size) {
    const bool right = size == kBeatBytes - kPrefixBytes;
    EXPECT_EQ(decode_beat(std::span(bytes).first(size)).has_value(), right) << size;
  }
}

TEST(Wire, HellosComeBack) {
  Hello hello;
  hello.size = 5;
  hello.rank = 3;
  hello.token[2] = std::byte{9};
  hello.settings_digest = 0x123456789ABCDEF0ULL;
  hello.host_digest = 77;
  const auto back = decode_hello(encode_hello(hello));
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->version, kWireVersion);
  EXPECT_EQ(back->size, 5);
  EXPECT_EQ(back->rank, 3);
  EXPECT_TRUE(equal_tokens(back->token, hello.token));
  EXPECT_EQ(back->settings_digest, hello.settings_digest);
  EXPECT_EQ(back->host_digest, 77U);
}

TEST(Wire, StrangersHellosAreRefused) {
  const HelloBytes good = encode_hello(Hello{});
  for (std::size_t i = 0; i < 8; ++i) {
    HelloBytes bad = good;
    bad[i] ^= std::byte{1};
    EXPECT_FALSE(decode_hello(bad).has_value());
  }
  HelloBytes swapped = good;
  std::swap(swapped[12], swapped[15]);  // the mark of the other endianness
  std::swap(swapped[13], swapped[14]);
  EXPECT_NE(decode_hello(swapped)->version, kWireVersion);
}

TEST(Wire, TokensDifferInAnyBit) {
  const Token zero{};
  EXPECT_TRUE(equal_tokens(zero, Token{}));
  for (std::size_t bit = 0; bit < 8 * kTokenBytes; ++bit) {
    Token other{};
    other[bit / 8] = static_cast<std::byte>(1U << (bit % 8));
    EXPECT_FALSE(equal_tokens(zero, other));
  }
}

TEST(Wire, AnAbortIsFoundBehindMessagesHoweverTheyAreCut) {
  std::vector<std::byte> stream(100);  // rest of a message that had begun
  for (const std::size_t size : {0, 3, 500}) {
    const PrefixBytes prefix = encode_prefix(FrameKind::kData, size);
    stream.insert(stream.end(), prefix.begin(), prefix.end());
    stream.resize(stream.size() + size, std::byte{0xEE});
  }
  const std::size_t messages_bytes = stream.size();
  const auto frame = encode_abort(kSample);
  stream.insert(stream.end(), frame.begin(), frame.end());
  for (const std::size_t step : {std::size_t{1}, std::size_t{7}, std::size_t{64}, stream.size()}) {
    AbortFinder finder(100);
    for (std::size_t at = 0; at < stream.size(); at += step) {
      const bool done =
          finder.feed(std::span(stream).subspan(at, std::min(step, stream.size() - at)));
      EXPECT_EQ(done, at + step >= stream.size());
    }
    ASSERT_TRUE(finder.found().has_value());
    EXPECT_EQ(finder.found()->message, kSample.message);
  }
  AbortFinder without(100);
  EXPECT_FALSE(without.feed(std::span(stream).first(messages_bytes)));
  EXPECT_FALSE(without.found().has_value());
}

}  // namespace
}  // namespace zensync::driver
