// Which rows of which rank are non-zero: the patterns that all tests of schemes run over.
// Place: tests/support. Pure functions of a seed; rows of each rank ascend and are distinct.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <string_view>
#include <vector>

#include "zensync/base/hash.hpp"

namespace zensync::test {

enum class Pattern {
  kUniform,
  kFront,
  kZipf,
  kClustered,
  kStrided,
  kIdentical,
  kDisjoint,
  kOneHot,
  kEmpty,
  kFull,
  kOneRank,
  kRagged,
  kEnds,
};
inline constexpr Pattern kAllPatterns[] = {
    Pattern::kUniform, Pattern::kFront,     Pattern::kZipf,     Pattern::kClustered,
    Pattern::kStrided, Pattern::kIdentical, Pattern::kDisjoint, Pattern::kOneHot,
    Pattern::kEmpty,   Pattern::kFull,      Pattern::kOneRank,  Pattern::kRagged,
    Pattern::kEnds};

inline std::string_view pattern_name(Pattern pattern) {
  constexpr std::string_view kNames[] = {"uniform",   "front",    "zipf",    "clustered", "strided",
                                         "identical", "disjoint", "one_hot", "empty",     "full",
                                         "one_rank",  "ragged",   "ends"};
  return kNames[static_cast<int>(pattern)];
}

using Rows = std::vector<std::uint64_t>;

/// A number in [0, 1) for each (seed, a, b).
inline double chance(std::uint64_t seed, std::uint64_t a, std::uint64_t b = 0) {
  return static_cast<double>(mix64(mix64(seed ^ a * 0x51ED27ULL) ^ b) >> 11) * 0x1p-53;
}

/// Rows kept with a probability that may depend on the place.
template <class Probability>
Rows keep_rows(std::uint64_t rows, std::uint64_t seed, Probability probability) {
  Rows kept;
  for (std::uint64_t row = 0; row < rows; ++row) {
    const double place = static_cast<double>(row) / static_cast<double>(rows);
    if (chance(seed, row) < probability(row, place)) kept.push_back(row);
  }
  return kept;
}

inline Rows zipf_rows(std::uint64_t rows, std::uint64_t seed, std::uint64_t draws) {
  std::set<std::uint64_t> drawn;
  for (std::uint64_t i = 0; i < draws; ++i) {
    const double rank = std::pow(static_cast<double>(rows) + 1, chance(seed, i)) - 1;
    drawn.insert(std::min(rows - 1, static_cast<std::uint64_t>(rank)));
  }
  return {drawn.begin(), drawn.end()};
}

inline Rows clustered_rows(std::uint64_t rows, std::uint64_t seed) {
  std::set<std::uint64_t> drawn;
  for (std::uint64_t i = 0; i < rows / 1000 + 2; ++i) {
    const auto begin = static_cast<std::uint64_t>(chance(seed, i) * static_cast<double>(rows));
    for (std::uint64_t row = begin; row < std::min(rows, begin + 40); ++row) drawn.insert(row);
  }
  return {drawn.begin(), drawn.end()};
}

/// `count` distinct rows, spread evenly.
inline Rows spread_rows(std::uint64_t rows, std::uint64_t count) {
  Rows kept;
  for (std::uint64_t i = 0; i < std::min(rows, count); ++i) {
    kept.push_back(i * rows / std::min(rows, count));
  }
  return kept;
}

struct PatternSpec {
  Pattern pattern = Pattern::kUniform;
  std::uint64_t rows = 0;
  int size = 1;
  double density = 0.05;
  std::uint64_t seed = 1;
};

inline std::uint64_t power_of_ten(int exponent) {
  std::uint64_t power = 1;
  for (int i = 0; i < std::min(exponent, 6); ++i) power *= 10;
  return power;
}

/// Rows of one rank.
inline Rows rows_of_rank(const PatternSpec& spec, int rank) {
  const std::uint64_t rows = spec.rows;
  if (rows == 0) return {};
  const auto r = static_cast<std::uint64_t>(rank);
  const std::uint64_t own = mix64(spec.seed * 1000 + r);
  const double d = spec.density;
  const auto flat = [d](std::uint64_t, double) { return d; };
  switch (spec.pattern) {
    case Pattern::kUniform:
      return keep_rows(rows, own, flat);
    case Pattern::kFront:
      return keep_rows(rows, own, [d](std::uint64_t, double x) {
        return std::min(1.0, 6 * d * std::exp(-6 * x));
      });
    case Pattern::kZipf:
      return zipf_rows(rows, own, static_cast<std::uint64_t>(d * 2 * static_cast<double>(rows)));
    case Pattern::kClustered:
      return clustered_rows(rows, own);
    case Pattern::kStrided:
      return keep_rows(rows, own, [](std::uint64_t row, double) { return row % 16 == 0; });
    case Pattern::kIdentical:
      return keep_rows(rows, spec.seed, flat);
    case Pattern::kDisjoint:
      return keep_rows(rows, spec.seed, [&spec, r, d](std::uint64_t row, double) {
        return row % static_cast<std::uint64_t>(spec.size) == r ? 4 * d : 0;
      });
    case Pattern::kOneHot:
      return {mix64(own) % rows};
    case Pattern::kEmpty:
      return {};
    case Pattern::kFull:
      return spread_rows(rows, rows);
    case Pattern::kOneRank:
      return rank == spec.size / 2 ? keep_rows(rows, own, flat) : Rows();
    case Pattern::kRagged:
      return spread_rows(rows, power_of_ten(rank));
    case Pattern::kEnds:
      return rows == 1 ? Rows{0} : Rows{0, rows - 1};
  }
  return {};
}

}  // namespace zensync::test
