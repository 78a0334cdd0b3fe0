// Bytes from elsewhere: flipped, cut, random, crafted. Place: tests of codec; run them under ASan
// too. With digests every change of one bit is found. Without them a message is refused, or what is
// read passes an independent walk: offsets ascend, lie in range, and nothing outside the message is
// touched.
#include <gtest/gtest.h>

#include "obvious_reader.hpp"
#include "zensync/base/hash.hpp"

namespace zensync::test {
namespace {

constexpr IndexCodec kPolicies[] = {IndexCodec::kBlocks, IndexCodec::kRaw32, IndexCodec::kBitmap,
                                    IndexCodec::kEliasFano};

/// Small messages with several blocks, a short last one, and each way of writing an index.
std::vector<std::pair<MessageSpec, Slots>> samples() {
  std::vector<std::pair<MessageSpec, Slots>> all;
  for (IndexCodec policy : kPolicies) {
    MessageSpec spec;
    spec.header.codec = policy;
    spec.header.total_units = 40;
    spec.job_headers = {JobHeader()};
    spec.slots = 203;
    Slots found;
    for (std::uint64_t slot = 0; slot < 203; slot += 1 + mix64(slot) % 9) found.push_back(slot);
    all.push_back({spec, found});
    if (policy == IndexCodec::kBitmap) continue;  // its blocks of 2 KiB are tried at random only
    spec.slots = 5 * 16384 + 77;
    found = {0, 5, 16383, 16384, 40000, 40001, 65535, 65536, 5 * 16384 + 76};
    for (std::uint64_t i = 0; i < 20; ++i) found.push_back(5 * 16384 - 30 + i);
    std::sort(found.begin(), found.end());
    all.push_back({spec, found});
    spec.slots = (1ULL << 33) + 9;
    found = {7, (1ULL << 32) + 3, (1ULL << 33) + 8};
    all.push_back({spec, found});
  }
  return all;
}

/// Parses and reads `message`; true if it was accepted, after the walk. Fails the test on an
/// unsound set.
bool accepts(const Bytes& message, const Expected& expected) {
  bool was_accepted = false;
  for (const kernels::Table* table : kernels::available()) {
    Bytes holder;
    const auto parsed = parse_exact(message, expected, holder);
    if (!parsed.ok()) {
      const ErrorKind kind = parsed.error().kind;
      EXPECT_TRUE(kind == ErrorKind::kCorruptMessage || kind == ErrorKind::kMismatch);
      EXPECT_FALSE(parsed.error().message.empty());
      return false;
    }
    const ParsedMessage& view = parsed.value();
    EXPECT_EQ(48 + view.job_headers.size() + view.values.size() + view.index.size(),
              message.size());
    for (std::size_t i = 0; i < view.header.job_headers; ++i) job_header_of(view, i);
    SparseSet set;
    const Status status = read_set(*table, view, expected, set);
    if (!status.ok()) {
      const ErrorKind kind = status.error().kind;
      EXPECT_TRUE(kind == ErrorKind::kCorruptMessage || kind == ErrorKind::kMismatch);
      EXPECT_FALSE(was_accepted) << table->name << " refuses what another accepts";
      continue;
    }
    const Walk walked = walk(set, expected.slots);
    EXPECT_TRUE(walked.is_sound) << table->name;
    EXPECT_EQ(walked.slots.size(), view.header.units);
    EXPECT_EQ(view.values.size(),
              walked.slots.size() * expected.width * dtype_bytes(set.values_dtype));
    EXPECT_TRUE(set.values == view.values.data() || set.units() == 0);
    was_accepted = true;
  }
  return was_accepted;
}

TEST(HostileMessage, DigestsFindEveryFlippedBit) {
  for (auto& [spec, found] : samples()) {
    MessageWriter writer;
    const Bytes message = write_message(kernels::active(), spec, found, writer);
    const Expected expected = expected_of(spec, 1, DType::kF32);
    ASSERT_TRUE(accepts(message, expected));
    for (std::size_t bit = 0; bit < message.size() * 8; ++bit) {
      Bytes flipped = message;
      flipped[bit / 8] ^= std::byte{1} << (bit % 8);
      EXPECT_FALSE(accepts(flipped, expected)) << "bit " << bit;
    }
    for (std::size_t at = 0; at < message.size(); ++at) {
      Bytes flipped = message;
      flipped[at] = ~flipped[at];
      EXPECT_FALSE(accepts(flipped, expected)) << "byte " << at;
    }
  }
}

TEST(HostileMessage, WithoutDigestsNoFlipGivesAnUnsoundSet) {
  int accepted = 0;
  int refused = 0;
  for (auto& [spec, found] : samples()) {
    spec.verify = false;
    MessageWriter writer;
    const Bytes message = write_message(kernels::active(), spec, found, writer);
    ASSERT_EQ(integer_at(message, 0, 8), 0U) << "no digest is written";
    const Expected expected = expected_of(spec, 1, DType::kF32);
    for (std::size_t at = 0; at < message.size(); ++at) {
      for (unsigned change : {1U, 2U, 16U, 128U, 255U, 0x55U}) {
        Bytes flipped = message;
        flipped[at] ^= static_cast<std::byte>(change);
        (accepts(flipped, expected) ? accepted : refused) += 1;
      }
    }
  }
  EXPECT_GT(accepted, 0);  // values are not checked without digests
  EXPECT_GT(refused, 0);
}

TEST(HostileMessage, EveryTruncationIsRefused) {
  for (bool verify : {true, false}) {
    for (auto& [spec, found] : samples()) {
      spec.verify = verify;
      MessageWriter writer;
      const Bytes message = write_message(kernels::active(), spec, found, writer);
      const Expected expected = expected_of(spec, 1, DType::kF32);
      for (std::size_t length = 0; length < message.size(); ++length) {
        const Bytes cut(message.begin(), message.begin() + static_cast<std::ptrdiff_t>(length));
        ASSERT_FALSE(accepts(cut, expected)) << length << " of " << message.size();
      }
      Bytes longer = message;
      longer.push_back(std::byte{0});
      EXPECT_FALSE(accepts(longer, expected));
    }
  }
}

/// Noise behind a header that is right, with and without a fitting length; and nothing but noise.
TEST(HostileMessage, RandomIndexBytes) {
  int accepted = 0;
  for (auto& [spec, found] : samples()) {
    spec.verify = false;
    MessageWriter writer;
    const Bytes message = write_message(kernels::active(), spec, found, writer);
    const Expected expected = expected_of(spec, 1, DType::kF32);
    const std::size_t index_begin = message.size() - integer_at(message, 24, 8);
    for (std::uint64_t seed = 0; seed < 3000; ++seed) {
      Bytes noise = message;
      const std::size_t begin = seed % 3 == 0 ? 0 : seed % 3 == 1 ? index_begin : 20;
      const std::size_t end = seed % 3 == 2 ? 32 : noise.size();
      for (std::size_t i = begin; i < end; ++i) {
        if (seed % 5 != 0 || i % 4 == 0) noise[i] = static_cast<std::byte>(mix64(seed * 4096 + i));
      }
      accepted += accepts(noise, expected);
    }
  }
  EXPECT_LT(accepted, 12000);
}

/// `read_index` alone, on noise of every length, against the number of units that it was told.
TEST(HostileMessage, RandomIndexWithoutMessage) {
  for (int codec = 0; codec <= kMaxIndexCodec + 1; ++codec) {
    for (std::uint64_t seed = 0; seed < 4000; ++seed) {
      const std::uint64_t hash = mix64(seed * 31 + static_cast<std::uint64_t>(codec));
      Bytes noise(hash % 60);
      for (std::size_t i = 0; i < noise.size(); ++i) {
        noise[i] = static_cast<std::byte>(mix64(hash + i) >> (seed % 2 == 0 ? 0 : 60));
      }
      const std::uint64_t slots = seed % 7 == 0 ? 1ULL << 33 : 1 + (hash >> 20) % 40000;
      SparseSet set;
      const IndexBytes index{static_cast<IndexCodec>(codec), noise,
                             static_cast<std::uint32_t>((hash >> 40) % 20), slots};
      const Status status = read_index(kernels::active(), index, set);
      if (!status.ok()) continue;
      const Walk walked = walk(set, slots);
      ASSERT_TRUE(walked.is_sound) << codec << " " << seed;
      ASSERT_EQ(walked.slots.size(), (hash >> 40) % 20);
    }
  }
}

/// An index that claims 2^32 − 1 units in a few bytes: refused without memory for them.
TEST(HostileMessage, HugeCountsAreRefused) {
  const Bytes few(40, std::byte{0xFF});
  for (int codec = 0; codec <= kMaxIndexCodec; ++codec) {
    SparseSet set;
    const IndexBytes index{static_cast<IndexCodec>(codec), few, 0xFFFFFFFFU, 1ULL << 40};
    const Status status = read_index(kernels::active(), index, set);
    ASSERT_FALSE(status.ok()) << codec;
    EXPECT_EQ(set.offsets.capacity_bytes(), 0U) << codec;
  }
}

/// Control: the walk sees each way in which a set can be unsound.
TEST(HostileMessageControl, TheWalkSeesUnsoundSets) {
  SparseSet set;
  set.offsets.resize_discard(3);
  set.offsets[0] = 1;
  set.offsets[1] = 5;
  set.offsets[2] = 6;
  set.runs = {{0, 0, 2}, {1, 2, 1}};
  EXPECT_TRUE(walk(set, 16384 + 7).is_sound);
  EXPECT_FALSE(walk(set, 16384 + 6).is_sound);
  set.offsets[1] = 1;
  EXPECT_FALSE(walk(set, 40000).is_sound);
  set.offsets[1] = 5;
  set.runs[1].block = 0;
  EXPECT_FALSE(walk(set, 40000).is_sound);
  set.runs[1] = {1, 2, 2};
  EXPECT_FALSE(walk(set, 40000).is_sound);
}

}  // namespace
}  // namespace zensync::test
