// Bitmap and Elias–Fano: round trips for many counts and slots, the same bytes from every table,
// and hostile bytes: whatever comes in, the answer is false or offsets that ascend below `slots`.
#include <algorithm>
#include <memory>

#include "data.hpp"

namespace zensync::kernels::test {
namespace {

std::vector<std::uint16_t> choose(std::uint32_t count, std::uint32_t slots, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::uint16_t> all(slots);
  for (std::uint32_t i = 0; i < slots; ++i) all[i] = static_cast<std::uint16_t>(i);
  std::shuffle(all.begin(), all.end(), random);
  all.resize(count);
  std::sort(all.begin(), all.end());
  return all;
}

enum class Form { kBitmap, kEliasFano };

std::size_t packed_bytes(Form form, std::uint32_t count, std::uint32_t slots) {
  return form == Form::kBitmap ? bitmap_bytes(slots) : elias_fano_bytes(count, slots);
}

std::vector<std::byte> pack(const Table& table, Form form,
                            const std::vector<std::uint16_t>& offsets, std::uint32_t slots) {
  const auto count = static_cast<std::uint32_t>(offsets.size());
  Guarded out(packed_bytes(form, count, slots));
  (form == Form::kBitmap ? table.pack_bitmap : table.pack_elias_fano)(offsets.data(), count, slots,
                                                                      out.data());
  EXPECT_TRUE(out.is_intact()) << table.name << " " << count << " of " << slots;
  return out.copy();
}

struct Unpacked {
  bool ok = false;
  std::vector<std::uint16_t> offsets;
};

/// The input lies at the end of an allocation of its own, so that AddressSanitizer sees a byte too
/// far.
Unpacked unpack(const Table& table, Form form, const std::vector<std::byte>& input,
                std::uint32_t count, std::uint32_t slots) {
  const auto exact = std::make_unique<std::byte[]>(input.size());
  if (!input.empty()) std::memcpy(exact.get(), input.data(), input.size());
  Guarded out((count + kSlackElems) * sizeof(std::uint16_t));
  const bool ok = (form == Form::kBitmap ? table.unpack_bitmap : table.unpack_elias_fano)(
      exact.get(), count, slots, out.as<std::uint16_t>());
  EXPECT_TRUE(out.is_intact()) << table.name << " " << count << " of " << slots;
  return {ok, {out.as<std::uint16_t>(), out.as<std::uint16_t>() + count}};
}

void round_trip(Form form, const std::vector<std::uint16_t>& offsets, std::uint32_t slots) {
  const auto count = static_cast<std::uint32_t>(offsets.size());
  const auto expected = pack(ref(), form, offsets, slots);
  for (const Table* table : available()) {
    ASSERT_EQ(pack(*table, form, offsets, slots), expected)
        << table->name << " " << count << " of " << slots;
    const Unpacked got = unpack(*table, form, expected, count, slots);
    ASSERT_TRUE(got.ok) << table->name << " " << count << " of " << slots;
    ASSERT_EQ(got.offsets, offsets) << table->name << " " << count << " of " << slots;
  }
}

TEST(Pack, RoundTripsOfManyShapes) {
  unsigned seed = 0;
  for (std::uint32_t slots : {1,  2,  3,   7,   8,   9,   15,   16,   17,   31,    32,    33,   63,
                              64, 65, 100, 127, 128, 129, 1000, 4095, 4096, 10000, 16383, 16384}) {
    for (std::uint32_t count :
         {0,   1,   2,    3,    7,    8,    9,    31,   32,   33,    63,    64,   65,
          100, 500, 1024, 3000, 5461, 5462, 8191, 8192, 8193, 12000, 16383, 16384}) {
      if (count > slots) continue;
      const auto offsets = choose(count, slots, ++seed);
      round_trip(Form::kBitmap, offsets, slots);
      if (count != 0) round_trip(Form::kEliasFano, offsets, slots);
    }
    round_trip(Form::kEliasFano, choose(slots, slots, 0), slots);
  }
}

TEST(Pack, RoundTripsOfRunsAtTheEnds) {
  for (std::uint32_t slots : {64, 1000, 16384}) {
    for (std::uint32_t count : {1, 2, 10, 40, 60}) {
      std::vector<std::uint16_t> first(count);
      std::vector<std::uint16_t> last(count);
      for (std::uint32_t i = 0; i < count; ++i) {
        first[i] = static_cast<std::uint16_t>(i);
        last[i] = static_cast<std::uint16_t>(slots - count + i);
      }
      for (const auto& offsets : {first, last}) {
        round_trip(Form::kBitmap, offsets, slots);
        round_trip(Form::kEliasFano, offsets, slots);
      }
    }
  }
}

TEST(Pack, SmallBlocksExhaustively) {
  for (std::uint32_t slots = 1; slots <= 10; ++slots) {
    for (std::uint32_t set = 1; set < (1U << slots); ++set) {
      std::vector<std::uint16_t> offsets;
      for (std::uint32_t i = 0; i < slots; ++i) {
        if ((set >> i & 1U) != 0) offsets.push_back(static_cast<std::uint16_t>(i));
      }
      round_trip(Form::kBitmap, offsets, slots);
      round_trip(Form::kEliasFano, offsets, slots);
    }
  }
}

/// Every table gives the answer of ref, and an answer of true comes with valid offsets.
bool check_hostile(Form form, const std::vector<std::byte>& bytes, std::uint32_t count,
                   std::uint32_t slots) {
  const Unpacked expected = unpack(ref(), form, bytes, count, slots);
  for (const Table* table : available()) {
    const Unpacked got = unpack(*table, form, bytes, count, slots);
    EXPECT_EQ(got.ok, expected.ok) << table->name << " " << count << " of " << slots;
    if (!got.ok) continue;
    EXPECT_EQ(got.offsets, expected.offsets);
    for (std::size_t i = 0; i < got.offsets.size(); ++i) {
      EXPECT_LT(got.offsets[i], slots);
      if (i != 0) {
        EXPECT_GT(got.offsets[i], got.offsets[i - 1]);
      }
    }
    EXPECT_EQ(pack(*table, form, got.offsets, slots), bytes) << "one set of offsets, one encoding";
  }
  return expected.ok;
}

TEST(Pack, HostileBytes) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 3000; ++round) {
    const std::uint32_t most = round % 2 == 0 ? 40 : kBlockSlots;
    const auto slots = static_cast<std::uint32_t>(1 + random() % most);
    const auto count = static_cast<std::uint32_t>(1 + random() % slots);
    for (Form form : {Form::kBitmap, Form::kEliasFano}) {
      std::vector<std::byte> bytes(packed_bytes(form, count, slots));
      for (auto& byte : bytes) byte = static_cast<std::byte>(random());
      check_hostile(form, bytes, count, slots);
    }
  }
}

// One bit changed in a good encoding: never a crash, never a second encoding of the same offsets.
TEST(Pack, EveryBitFlipped) {
  std::size_t refused = 0;
  std::size_t tried = 0;
  for (std::uint32_t slots : {9, 37, 200, 1000}) {
    for (std::uint32_t count : {1, 3, 8, 9}) {
      const auto offsets = choose(count, slots, slots + count);
      for (Form form : {Form::kBitmap, Form::kEliasFano}) {
        const auto good = pack(ref(), form, offsets, slots);
        for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
          auto bad = good;
          bad[bit / 8] ^= std::byte{1} << (bit % 8);
          const bool ok = check_hostile(form, bad, count, slots);
          if (form == Form::kBitmap) {
            EXPECT_FALSE(ok) << "the count is wrong, or padding is set";
          }
          refused += ok ? 0 : 1;
          ++tried;
        }
      }
    }
  }
  EXPECT_GT(refused, tried / 2);
}

TEST(Pack, WrongCounts) {
  const auto offsets = choose(100, 1000, 1);
  const auto bitmap = pack(ref(), Form::kBitmap, offsets, 1000);
  for (const Table* table : available()) {
    for (std::uint32_t count : {0U, 1U, 99U, 101U, 1000U}) {
      EXPECT_FALSE(unpack(*table, Form::kBitmap, bitmap, count, 1000).ok);
    }
    EXPECT_FALSE(unpack(*table, Form::kBitmap, bitmap, 1001, 1000).ok);
    const std::vector<std::byte> plenty(20000, std::byte{0xFF});
    EXPECT_FALSE(unpack(*table, Form::kEliasFano, plenty, 0, 1000).ok);
    EXPECT_FALSE(unpack(*table, Form::kEliasFano, plenty, 1001, 1000).ok);
    EXPECT_FALSE(unpack(*table, Form::kEliasFano, plenty, 1, 0).ok);
    EXPECT_FALSE(unpack(*table, Form::kEliasFano, plenty, 5, kBlockSlots + 1).ok);
    EXPECT_FALSE(unpack(*table, Form::kBitmap, plenty, 5, kBlockSlots + 1).ok);
    EXPECT_TRUE(unpack(*table, Form::kBitmap, {}, 0, 0).ok);
  }
}

TEST(Pack, SizesByHand) {
  EXPECT_EQ(elias_fano_low_bits(1, 16384), 14U);
  EXPECT_EQ(elias_fano_low_bits(8193, 16384), 0U);
  EXPECT_EQ(elias_fano_bytes(4, 16), 2U);  // 4 + 4 bits above, 4 × 2 bits below
  const std::uint16_t offsets[] = {1, 6, 7, 15};
  std::byte out[2];
  ref().pack_elias_fano(offsets, 4, 16, out);
  // Buckets 0 1 1 3 → positions 0 2 3 6; low parts 1 2 3 3.
  EXPECT_EQ(std::to_integer<unsigned>(out[0]), 0b01001101U);
  EXPECT_EQ(std::to_integer<unsigned>(out[1]), 0b11111001U);
}

}  // namespace
}  // namespace zensync::kernels::test
