// What must come out of a property case: the dense sum by plain loops, counts, bytes of messages.
// Place: tests of the engine, for property_test.cpp. It shares nothing with schemes and kernels but
// `traffic()`, which is itself held against the wire here.
// Order of adding: docs/numerics.md. Rank order for the one-shot schemes, the tree of recursive
// doubling, for the ring the order in which a segment goes round. So bits must agree on all inputs;
// only where the oracle has a NaN any NaN will do (but all ranks must hold the same one).
// Owner: results are values. Pure; nothing fails.
#pragma once

#include <cstdint>
#include <vector>

#include "property_cases.hpp"
#include "zensync/scheme/traffic.hpp"

namespace zensync::test {

struct Expected {
  std::vector<std::int64_t> rows;  ///< of the union, ascending
  /// Dense-stored: the whole tensor, as every rank must hold it. COO: the values of `rows`.
  std::vector<std::byte> image;
  std::uint64_t union_units = 0;
  std::vector<RankTraffic> traffic;
};

/// kReversed: a wrong oracle, for the controls.
enum class Adding { kDocumented, kReversed };

Expected oracle(const PropertyCase& given, const Inputs& inputs,
                Adding adding = Adding::kDocumented);

}  // namespace zensync::test
