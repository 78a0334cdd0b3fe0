// Random cases of all schemes against an oracle, each drawn from one seed: 20 000 by default, times
// ZENSYNC_TEST_FACTOR. Place: tests of the engine. What holds for every case: all ranks hold the
// dense sum, bit for bit, in the documented order of adding; nothing else was written; counts are
// equal on all ranks and right; messages have the bytes that `traffic()` says.
// A failure prints what ZENSYNC_PROPERTY takes to run it again, made smaller first.
// Seeds are fixed: the same cases in every run, more of them with a larger factor.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>

#include "property_run.hpp"
#include "zensync/base/hash.hpp"

namespace zensync::test {
namespace {

constexpr int kShards = 8;
constexpr std::uint64_t kCases = 20000;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::uint64_t kSlower = 10;  // under sanitizers a tenth of the cases
#else
constexpr std::uint64_t kSlower = 1;
#endif

std::uint64_t seed_at(std::uint64_t index) { return mix64(0x5EED0000000ULL + index); }

std::uint64_t factor() {
  const char* text = std::getenv("ZENSYNC_TEST_FACTOR");
  const std::uint64_t value = text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
  return std::max<std::uint64_t>(value, 1);
}

using Fails = std::function<bool(const PropertyCase&)>;

/// The smallest failing case that lowering one bound after the other finds.
PropertyCase shrink(const PropertyCase& failing, const Fails& fails) {
  PropertyCase best = failing;
  best.limits = {static_cast<std::uint64_t>(failing.size), failing.row_runs(),
                 failing.spec.row_elems, std::max<std::uint64_t>(failing.plan.chunk_ends.size(), 1),
                 failing.stride};
  constexpr std::uint64_t Limits::*kFields[] = {&Limits::rows, &Limits::size, &Limits::row_elems,
                                                &Limits::chunks, &Limits::stride};
  bool smaller = true;
  for (int round = 0; smaller && round < 100; ++round) {
    smaller = false;
    for (const auto field : kFields) {
      const std::uint64_t now = best.limits.*field;
      for (const std::uint64_t next : {std::uint64_t{1}, now / 2, now - now / 8, now - 1}) {
        if (next == 0 || next >= now) continue;
        Limits trial = best.limits;
        trial.*field = next;
        const PropertyCase candidate = draw_case(best.seed, trial);
        if (!fails(candidate)) continue;
        best = candidate;
        smaller = true;
        break;
      }
    }
  }
  return best;
}

/// What to print for a case that failed with `what`.
std::string report(const PropertyCase& failing, const std::string& what) {
  const auto alone = [](const PropertyCase& given) {
    RankPool fresh;
    return failure_of(given, fresh);
  };
  const std::string first = "\n  " + what + "\n  " + describe(failing);
  if (alone(failing).empty()) return first + "\n  only in workspaces that were used before";
  const PropertyCase small =
      shrink(failing, [&](const PropertyCase& given) { return !alone(given).empty(); });
  return first + "\n smaller:\n  " + alone(small) + "\n  " + describe(small);
}

class Property : public ::testing::TestWithParam<int> {};

TEST_P(Property, EveryRankHoldsTheDenseSumAndNothingElseChanged) {
  RankPool pool;
  const std::uint64_t cases = std::max<std::uint64_t>(kCases * factor() / kShards / kSlower, 1);
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t i = 0; i < cases; ++i) {
    const PropertyCase given =
        draw_case(seed_at(i * kShards + static_cast<std::uint64_t>(GetParam())));
    const std::string what = failure_of(given, pool);
    if (!what.empty()) FAIL() << "case " << i << " of " << cases << report(given, what);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  const auto rate = static_cast<std::uint64_t>(static_cast<double>(cases) / seconds.count());
  std::cout << "  " << cases << " cases, " << rate << " a second\n";
  RecordProperty("cases_per_s", std::to_string(rate));
}
INSTANTIATE_TEST_SUITE_P(Shard, Property, ::testing::Range(0, kShards));

/// ZENSYNC_PROPERTY="SEED[:size:rows:row_elems:chunks:stride]" runs that case, as a failure prints
/// it.
TEST(PropertyOne, ACaseByItsKey) {
  const char* text = std::getenv("ZENSYNC_PROPERTY");
  std::uint64_t seed = 0;
  Limits limits;
  ASSERT_TRUE(parse_repeat_key(text == nullptr ? "0x2a:9:300:17:6:1" : text, seed, limits));
  const PropertyCase given = draw_case(seed, limits);
  std::uint64_t again = 0;
  Limits read;
  ASSERT_TRUE(parse_repeat_key(repeat_key(given), again, read));
  EXPECT_EQ(describe(draw_case(again, read)), describe(given));
  if (text != nullptr) std::cout << "  " << describe(given) << "\n";
  RankPool pool;
  EXPECT_EQ(failure_of(given, pool), "");
}

/// A case with its expectation, to be spoilt by a control.
struct Control {
  explicit Control(std::uint64_t index) : given(draw_case(seed_at(index), {9, 300, 17, 6, 1})) {}
  std::string run(RankPool& pool, Fault* fault = nullptr, Adding adding = Adding::kDocumented) {
    inputs = make_inputs(given);
    expected = oracle(given, inputs, adding);
    outcome = run_case(given, inputs, pool, fault);
    return compare(given, inputs, outcome, expected);
  }
  std::string again() const { return compare(given, inputs, outcome, expected); }
  PropertyCase given;
  Inputs inputs;
  Expected expected;
  Outcome outcome;
};

constexpr std::uint64_t kControls = 2000;

TEST(PropertyControl, OneWrongBitOrCountIsSeen) {
  RankPool pool;
  int tried = 0;
  for (std::uint64_t i = 0; i < kControls; ++i) {
    Control control(i);
    ASSERT_EQ(control.run(pool), "");
    if (control.expected.image.empty() || control.given.kind == Kind::kSpecial) continue;
    ++tried;
    control.expected.image[i % control.expected.image.size()] ^= std::byte{1};
    EXPECT_NE(control.again(), "") << describe(control.given);
    control.expected.image[i % control.expected.image.size()] ^= std::byte{1};
    control.expected.traffic.back().received_bytes += 1;
    EXPECT_NE(control.again(), "") << describe(control.given);
    control.expected.traffic.back().received_bytes -= 1;
    control.inputs.ranks.back().memory.back() ^= std::byte{1};
    EXPECT_NE(control.again(), "") << "fence: " << describe(control.given);
    control.inputs.ranks.back().memory.back() ^= std::byte{1};
    if (control.given.plan.scheme == SchemeId::kDenseRing) continue;
    control.outcome.ranks.back().counts.union_units += 1;
    EXPECT_NE(control.again(), "") << "counts: " << describe(control.given);
  }
  EXPECT_GT(tried, 500);
}

/// Ranks that hold different NaNs: right by the rule, but not equal.
TEST(PropertyControl, AnotherNanOnOneRankIsSeen) {
  RankPool pool;
  int seen = 0;
  for (std::uint64_t i = 0; seen < 3; ++i) {
    Control control(i);
    const PropertyCase& given = control.given;
    if (given.kind != Kind::kSpecial || given.is_coo() || given.spec.dtype != DType::kF32) continue;
    if (given.size == 1) continue;
    ASSERT_EQ(control.run(pool), "");
    const std::size_t elems = given.spec.elems();
    for (std::size_t at = 0; at < elems; ++at) {
      float value = 0;
      std::memcpy(&value, control.inputs.data(1) + at * 4, 4);
      if (value == value) continue;
      control.inputs.data(1)[at * 4] ^= std::byte{1};
      EXPECT_NE(control.again(), "") << describe(given);
      ++seen;
      break;
    }
  }
}

TEST(PropertyControl, AnotherOrderOfAddingIsSeen) {
  RankPool pool;
  int seen[6] = {};
  for (std::uint64_t i = 0; i < kControls; ++i) {
    Control control(i);
    if (control.given.kind != Kind::kFloats || !is_float(control.given.spec.dtype)) continue;
    if (control.run(pool, nullptr, Adding::kReversed).empty()) continue;
    ++seen[static_cast<int>(control.given.plan.scheme)];
  }
  for (SchemeId scheme : {SchemeId::kBalanced, SchemeId::kRecursiveDoubling, SchemeId::kAgSparse,
                          SchemeId::kDenseRing}) {
    EXPECT_GT(seen[static_cast<int>(scheme)], 3) << static_cast<int>(scheme);
  }
}

/// With digests any flipped bit is an error; without, one in an owner's sums is a wrong result.
TEST(PropertyControl, AFlippedByteIsSeen) {
  RankPool pool;
  int flipped[2] = {};
  for (std::uint64_t i = 0; i < kControls; ++i) {
    Control control(i);
    if (control.given.kind == Kind::kSpecial) continue;
    Fault fault{Fault::What::kFlip, !control.given.wire.verify, mix64(i) % 8, mix64(i + 1), false};
    const std::string what = control.run(pool, &fault);
    if (!fault.was_done) {
      EXPECT_EQ(what, "");
      continue;
    }
    ++flipped[control.given.wire.verify ? 1 : 0];
    EXPECT_NE(what, "") << describe(control.given);
    if (control.given.wire.verify) {
      EXPECT_NE(control.outcome.error.find("corrupt"), std::string::npos) << control.outcome.error;
    }
  }
  EXPECT_GT(flipped[0], 50);
  EXPECT_GT(flipped[1], 300);
}

TEST(PropertyControl, AnEmptyMessageIsSeen) {
  RankPool pool;
  for (std::uint64_t i = 0; i < 200; ++i) {
    Control control(i);
    Fault fault{Fault::What::kEmpty, false, i % 5, 0, false};
    const std::string what = control.run(pool, &fault);
    EXPECT_EQ(fault.was_done, !what.empty()) << what << describe(control.given);
  }
}

/// The rank that waits for a lost message, or gets the one behind it, does not end well.
TEST(PropertyControl, ALostMessageIsSeen) {
  RankPool pool;
  int waiting = 0;
  for (std::uint64_t i = 0; i < 200; ++i) {
    Control control(i);
    Fault fault{Fault::What::kLose, false, i % 5, 0, false};
    const std::string what = control.run(pool, &fault);
    EXPECT_EQ(fault.was_done, !what.empty()) << what << describe(control.given);
    if (what.find("waits for ever") != std::string::npos) ++waiting;
  }
  EXPECT_GT(waiting, 50);
}

TEST(PropertyControl, ShrinkingFindsTheSmallestCase) {
  const Fails fails = [](const PropertyCase& given) {
    return given.size >= 3 && given.spec.rows >= 5 && given.spec.row_elems >= 2;
  };
  int shrunk = 0;
  for (std::uint64_t i = 0; i < 200; ++i) {
    const PropertyCase given = draw_case(seed_at(i));
    if (!fails(given) || given.stride > 1) continue;
    const PropertyCase small = shrink(given, fails);
    EXPECT_EQ(small.size, 3);
    EXPECT_EQ(small.spec.rows, 5U);
    EXPECT_EQ(small.spec.row_elems, 2U);
    EXPECT_EQ(small.plan.scheme, given.plan.scheme);
    ++shrunk;
  }
  EXPECT_GT(shrunk, 50);
}

/// Every choice is drawn now and then, or a class of cases would be missing unnoticed.
TEST(PropertyControl, AllChoicesAreDrawn) {
  std::map<std::string, int> drawn;
  for (std::uint64_t i = 0; i < 5000; ++i) {
    const PropertyCase given = draw_case(seed_at(i));
    const auto count = [&](const char* field, std::uint64_t value) {
      ++drawn[std::string(field) + " " + std::to_string(value)];
    };
    count("size", static_cast<std::uint64_t>(given.size));
    count("dtype", static_cast<std::uint64_t>(given.spec.dtype));
    count("scheme", static_cast<std::uint64_t>(given.plan.scheme));
    count("hold", static_cast<std::uint64_t>(given.hold));
    count("spread", static_cast<std::uint64_t>(given.spread));
    count("kind", static_cast<std::uint64_t>(given.kind));
    count("chunks", given.plan.chunk_ends.size());
    count("codec", static_cast<std::uint64_t>(given.wire.codec));
    count("range", given.wire.partition == PartitionKind::kRange);
    count("verify", given.wire.verify);
    count("avg", given.op == ReduceOp::kAvg);
    count("row_elems", given.spec.row_elems);
    count("many rows", given.row_runs() / 1000 == 0 ? 0 : given.row_runs() > 16384 ? 2 : 1);
    count("stride", given.stride > 1);
  }
  const std::map<std::string, std::size_t> all = {
      {"size", 11},      {"dtype", 6},  {"scheme", 4},    {"hold", 4},  {"spread", 7},
      {"kind", 6},       {"chunks", 7}, {"codec", 4},     {"range", 2}, {"verify", 2},
      {"row_elems", 17}, {"avg", 2},    {"many rows", 3}, {"stride", 2}};
  std::map<std::string, std::size_t> found;
  for (const auto& [name, times] : drawn) ++found[name.substr(0, name.rfind(' '))];
  EXPECT_EQ(found, all);
}

}  // namespace
}  // namespace zensync::test
