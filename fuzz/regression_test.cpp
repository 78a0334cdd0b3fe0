// The fuzz targets without libFuzzer: every seed, and simple changes of it, must keep the
// properties. Place: fuzz; part of ctest. Seeds must reach the code behind the first checks, which
// the controls show.
#include <gtest/gtest.h>

#include "sets.hpp"
#include "zensync/base/hash.hpp"

namespace zensync::fuzz {
namespace {

class Regression : public ::testing::TestWithParam<Target> {};

TEST_P(Regression, SeedsKeepTheProperties) {
  const Corpus corpus = GetParam().seeds();
  ASSERT_GE(corpus.size(), 5U);
  for (const Bytes& seed : corpus) {
    EXPECT_LE(seed.size(), GetParam().most_bytes + 4096);
    GetParam().run(seed);
  }
  GetParam().run({});
}

TEST_P(Regression, ChangedSeedsKeepTheProperties) {
  std::uint64_t state = 1;
  const auto draw = [&state](std::uint64_t below) { return (state = mix64(state)) % below; };
  const Corpus corpus = GetParam().seeds();
  for (int round = 0; round < 100000; ++round) {
    Bytes bytes = corpus[draw(corpus.size())];
    for (std::uint64_t changes = 1 + draw(4); changes > 0 && !bytes.empty(); --changes) {
      const std::size_t at = draw(bytes.size());
      switch (draw(4)) {
        case 0:
          bytes[at] ^= std::byte{1} << draw(8);
          break;
        case 1:
          bytes[at] = static_cast<std::byte>(draw(256));
          break;
        case 2:
          bytes.resize(at);
          break;
        default:
          bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                       static_cast<std::byte>(draw(256)));
      }
    }
    GetParam().run(bytes);
  }
}

/// Controls: a property that does not hold ends the process.
TEST(RegressionDeathTest, UnsoundSetsAreSeen) {
  SparseSet set;
  fill_set({1, 5, 16384}, set);
  require_sound(set, 16385, 3);
  EXPECT_DEATH(require_sound(set, 16384, 3), "a slot lies in range");
  EXPECT_DEATH(require_sound(set, 16385, 2), "as many units as stated");
  set.offsets[1] = 1;
  EXPECT_DEATH(require_sound(set, 16385, 3), "offsets ascend");
  set.offsets[1] = 5;
  set.runs[1].block = 0;
  EXPECT_DEATH(require_sound(set, 16385, 3), "blocks ascend");
}

/// Control: most seeds are taken for good, so that changes of them reach behind the first checks.
TEST_P(Regression, ControlMostSeedsAreAccepted) {
  const Corpus corpus = GetParam().seeds();
  const std::uint64_t before = accepted();
  for (const Bytes& seed : corpus) GetParam().run(seed);
  EXPECT_GT(accepted() - before, corpus.size() / 2);
}

INSTANTIATE_TEST_SUITE_P(Targets, Regression,
                         ::testing::ValuesIn(all_targets().begin(), all_targets().end()),
                         [](const auto& given) { return std::string(given.param.name); });

}  // namespace
}  // namespace zensync::fuzz
