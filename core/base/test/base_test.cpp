// Buffers, results, hashes and floating-point scopes: what every other module builds on.
// Place: tests of base. Known values come from the algorithms' own publications: SplitMix64's first
// outputs for the seeds 0 and 1, XXH3-64's digests of "", "a" and "abc".
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <string>

#include "zensync/base/buffer.hpp"
#include "zensync/base/fp_env.hpp"
#include "zensync/base/hash.hpp"
#include "zensync/base/result.hpp"
#include "zensync/base/topology.hpp"

namespace zensync::test {
namespace {

std::string text_of(const Buffer& buffer) {
  return {reinterpret_cast<const char*>(buffer.data()), buffer.size()};
}

TEST(Buffer, IsAlignedAndStartsEmpty) {
  Buffer buffer;
  EXPECT_EQ(buffer.size(), 0U);
  EXPECT_EQ(buffer.capacity(), 0U);
  EXPECT_EQ(buffer.data(), nullptr);
  buffer.append(nullptr, 0);
  EXPECT_EQ(buffer.capacity(), 0U);
  buffer.resize_discard(1);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % kBufferAlign, 0U);
}

TEST(Buffer, GrowsByHalfAndKeepsItsMemory) {
  Buffer buffer;
  buffer.resize_discard(1000);
  EXPECT_EQ(buffer.capacity(), 1024U);
  buffer.resize_discard(1025);
  EXPECT_EQ(buffer.capacity(), 1536U);
  const std::byte* before = buffer.data();
  buffer.clear();
  buffer.resize_discard(10);
  buffer.resize_keep(1536);
  EXPECT_EQ(buffer.capacity(), 1536U);
  EXPECT_EQ(buffer.data(), before);
}

TEST(Buffer, KeepsItsContentWhenItGrows) {
  Buffer buffer;
  std::string expected;
  for (int i = 0; i < 200; ++i) {
    const std::string piece = std::to_string(i);
    buffer.append(piece.data(), piece.size());
    expected += piece;
  }
  EXPECT_EQ(text_of(buffer), expected);
  buffer.resize_keep(3);
  EXPECT_EQ(text_of(buffer), expected.substr(0, 3));
}

TEST(Buffer, HoldsWhatItHeldWhenThereIsNoMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers end the program at such a request";
#else
  Buffer buffer;
  buffer.append("kept", 4);
  EXPECT_THROW(buffer.resize_keep(std::size_t{1} << 62), std::bad_alloc);
  EXPECT_EQ(text_of(buffer), "kept");
#endif
}

TEST(Array, CountsElements) {
  Array<std::uint32_t> array;
  EXPECT_TRUE(array.empty());
  array.resize_discard(3);
  for (std::size_t i = 0; i < 3; ++i) array[i] = static_cast<std::uint32_t>(i * i);
  array.resize_keep(1000);
  EXPECT_EQ(array.span().size(), 1000U);
  EXPECT_EQ(array[2], 4U);
  EXPECT_GE(array.capacity_bytes(), 4000U);
}

TEST(Result, HoldsAValueOrAnError) {
  const Result<std::string> good(std::string("value"));
  ASSERT_TRUE(good.ok());
  EXPECT_EQ(good.value(), "value");
  EXPECT_TRUE(good.status().ok());

  const Result<std::string> bad(make_error(ErrorKind::kDeadline, "too late", Rank{3}));
  ASSERT_FALSE(bad.ok());
  EXPECT_THROW(static_cast<void>(bad.value()), std::bad_variant_access);
  const Status status = bad.status();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::kDeadline);
  EXPECT_EQ(status.error().message, "too late");
  EXPECT_EQ(status.error().culprit, Rank{3});
  EXPECT_EQ(status.error().rank, Rank{-1});
  EXPECT_TRUE(status.error().tensor.empty());
}

TEST(Result, AStatusIsGoodUntilItGetsAnError) {
  Status status;
  EXPECT_TRUE(status.ok());
  status = make_error(ErrorKind::kInvalid, "no");
  EXPECT_FALSE(status.ok());
}

TEST(Hash, HasTheKnownValues) {
  EXPECT_EQ(mix64(0), 0xE220A8397B1DCDAFULL);
  EXPECT_EQ(mix64(1), 0x910A2DEC89025CC1ULL);
  EXPECT_EQ(digest64(nullptr, 0), 0x2D06800538D394C2ULL);
  EXPECT_EQ(digest64("a", 1), 0xE6C632B61E964E1FULL);
  EXPECT_EQ(digest64("abc", 3), 0x78AF5F94892F3950ULL);
  EXPECT_EQ(key_of("abc"), 0x78AF5F94892F3950ULL);
}

TEST(Hash, TellsNamesApart) {
  std::set<std::uint64_t> keys;
  for (int i = 0; i < 1000; ++i) keys.insert(key_of("layer." + std::to_string(i)));
  EXPECT_EQ(keys.size(), 1000U);
  EXPECT_EQ(keys.count(0), 0U);
}

TEST(Topology, FlatMakesEveryRankAHost) {
  const Topology topology = flat_topology(3);
  ASSERT_EQ(topology.size(), 3);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(topology.places[static_cast<std::size_t>(rank)].host, rank);
    EXPECT_EQ(topology.places[static_cast<std::size_t>(rank)].local_rank, 0);
  }
}

#if defined(__x86_64__)

constexpr unsigned kFlushBits = 0x8040;

/// Half of the smallest normal float: 0 where denormals are flushed.
float half_of_the_smallest() {
  volatile float value = std::numeric_limits<float>::min();
  return value * 0.5F;
}

/// Denormals flushed, as `torch.set_flush_denormal(True)` does it, until the end of the scope.
class Flushed {
 public:
  Flushed() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushBits); }
  ~Flushed() { _mm_setcsr(saved_); }
  Flushed(const Flushed&) = delete;
  Flushed& operator=(const Flushed&) = delete;

 private:
  unsigned saved_;
};

TEST(ExactFloats, RestoresWhatItFound) {
  const Flushed flushed;
  EXPECT_EQ(half_of_the_smallest(), 0.0F);  // the control: without the scope denormals are lost
  {
    const ScopedExactFloats exact;
    EXPECT_GT(half_of_the_smallest(), 0.0F);
    {
      const ScopedExactFloats inner;
      EXPECT_GT(half_of_the_smallest(), 0.0F);
    }
    EXPECT_GT(half_of_the_smallest(), 0.0F);
  }
  EXPECT_EQ(half_of_the_smallest(), 0.0F);
  EXPECT_EQ(_mm_getcsr() & kFlushBits, kFlushBits);
}

#endif

}  // namespace
}  // namespace zensync::test
