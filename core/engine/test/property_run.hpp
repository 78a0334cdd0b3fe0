// Runs a property case: n schemes in one thread, their messages handed over in memory; and compares
// what they left with the oracle. Place: tests of the engine, for property_test.cpp.
// The rules of exchange.hpp are kept and used up: between two ranks messages stay in order, a
// receiver gets what there is as soon as it waits, ranks are resumed in a drawn order, and with
// `late_sends` a message is read from the sender's memory as late as its life allows.
// Owner: a RankPool keeps workspaces over cases, as an engine does over jobs; Outcome is a value.
// Threads: one. Failures are texts; an empty one says that all is well.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "prepare.hpp"
#include "property_cases.hpp"
#include "property_oracle.hpp"

namespace zensync::test {

struct RankMemory {
  RankMemory(int size, const kernels::Table& plain, const kernels::Table& other)
      : workspace(size), preparer(plain), mixed_preparer(other), mixed_table(other) {}
  Workspace workspace;
  Preparer preparer;
  Preparer mixed_preparer;
  const kernels::Table& mixed_table;
};

/// Workspaces by number of ranks, used again and again.
class RankPool {
 public:
  std::vector<std::unique_ptr<RankMemory>>& of(int size);

 private:
  std::map<int, std::vector<std::unique_ptr<RankMemory>>> pool_;
};

/// What the driver does wrong with one message, for the controls: it flips a bit, empties it or
/// loses it. Messages are counted as they are delivered.
struct Fault {
  enum class What { kNothing, kFlip, kEmpty, kLose };
  What what = What::kNothing;
  bool pull_values_only = false;  ///< kFlip: only a bit of the values of an owner's sums
  std::uint64_t message = 0;      ///< the first one, counted from 0, that may be hit
  std::uint64_t at = 0;           ///< byte, modulo the length (or that of the values)
  bool was_done = false;
};

struct RankOutcome {
  KnownCounts counts;
  UnitSink sink;
  RankTraffic traffic;
  std::uint64_t input_digest = 0;  ///< of COO entries, before
};

struct Outcome {
  std::string error;  ///< a scheme's error, or what the driver could not do
  std::vector<RankOutcome> ranks;
};

Outcome run_case(const PropertyCase& given, Inputs& inputs, RankPool& pool, Fault* fault = nullptr);

/// What is wrong, or an empty text.
std::string compare(const PropertyCase& given, const Inputs& inputs, const Outcome& outcome,
                    const Expected& expected);

/// The whole way: inputs, oracle, run, comparison.
std::string failure_of(const PropertyCase& given, RankPool& pool);

}  // namespace zensync::test
