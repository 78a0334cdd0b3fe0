// What a property case left, against the oracle; see property_run.hpp. Place: tests of the engine.
// Results bit for bit (NaN by rule, but the same on all ranks), memory that no one may touch,
// counts that all ranks hold alike, bytes that `traffic()` says.
// Pure: reads what was left; the first thing that is wrong becomes a text.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>

#include "element.hpp"
#include "property_run.hpp"
#include "zensync/base/hash.hpp"

namespace zensync::test {
namespace {

using Bytes = std::span<const std::byte>;

bool equal(Bytes a, Bytes b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

Bytes result_of(const PropertyCase& given, const Inputs& inputs, const Outcome& outcome,
                std::size_t rank) {
  if (given.is_coo()) return outcome.ranks[rank].sink.values().bytes();
  return {inputs.data(rank), given.spec.rows * given.row_bytes()};
}

/// Element by element: equal bits, or both NaN.
std::string compare_values(const PropertyCase& given, Bytes expected, Bytes actual) {
  if (equal(expected, actual)) return {};
  const DType t = given.spec.dtype;
  std::ostringstream text;
  if (expected.size() != actual.size()) {
    text << actual.size() << " bytes of values, not " << expected.size();
    return text.str();
  }
  for (std::size_t i = 0; i < expected.size() / dtype_bytes(t); ++i) {
    const std::uint64_t wanted = load(expected, i, t);
    const std::uint64_t found = load(actual, i, t);
    if (wanted == found) continue;
    if (is_float(t) && std::isnan(value_of(wanted, t)) && std::isnan(value_of(found, t))) continue;
    text << "element " << i << " has bits " << std::hex << found << ", not " << wanted;
    return text.str();
  }
  return {};
}

std::string compare_result(const PropertyCase& given, const Inputs& inputs, const Outcome& outcome,
                           const Expected& expected) {
  for (std::size_t rank = 0; rank < outcome.ranks.size(); ++rank) {
    const std::string where = "rank " + std::to_string(rank) + ": ";
    const Bytes result = result_of(given, inputs, outcome, rank);
    if (rank > 0 && !equal(result, result_of(given, inputs, outcome, 0))) {
      const std::string what = compare_values(given, expected.image, result);
      return where + "other bits than rank 0; " + (what.empty() ? "both are a right NaN" : what);
    }
    if (rank == 0) {
      const std::string what = compare_values(given, expected.image, result);
      if (!what.empty()) return where + what;
    }
    if (!given.is_coo()) continue;
    const auto rows = outcome.ranks[rank].sink.rows().span();
    if (!std::equal(rows.begin(), rows.end(), expected.rows.begin(), expected.rows.end())) {
      return where + std::to_string(rows.size()) + " rows, or other ones, for " +
             std::to_string(expected.rows.size());
    }
  }
  return {};
}

/// The fences round each tensor; COO entries, which are the caller's, as they were.
std::string compare_memory(const PropertyCase& given, const Inputs& inputs,
                           const Outcome& outcome) {
  const auto is_fence = [](std::byte b) { return b == kFence; };
  for (std::size_t rank = 0; rank < outcome.ranks.size(); ++rank) {
    const RankInput& input = inputs.ranks[rank];
    const std::string where = "rank " + std::to_string(rank) + ": ";
    const Bytes memory(input.memory);
    if (!std::all_of(memory.begin(),
                     memory.begin() + static_cast<std::ptrdiff_t>(inputs.lead_bytes), is_fence) ||
        !std::all_of(memory.end() - kFenceBytes, memory.end(), is_fence)) {
      return where + "memory outside the tensor was written";
    }
    const std::size_t bytes = input.indices.size() * sizeof(std::int64_t);
    if (given.is_coo() &&
        outcome.ranks[rank].input_digest != (digest64(memory.data(), memory.size()) ^
                                             mix64(digest64(input.indices.data(), bytes)))) {
      return where + "COO entries were written";
    }
  }
  return {};
}

/// Whether the count of elements that travelled is right: non-zero elements where units are wider
/// and were searched; rows where units are single elements of rows (a row that chunks cut counts
/// once in each).
bool elements_fit(const PropertyCase& given, const RankInput& input, std::uint64_t elements) {
  if (given.plan.width > 1) return elements == (given.is_listed() ? 0 : input.nonzero_elems);
  const bool counts_rows = given.spec.row_elems > 1 && given.plan.scheme == SchemeId::kBalanced &&
                           given.wire.partition == PartitionKind::kRotation;
  if (!counts_rows) return elements == 0;
  std::uint64_t rows = 0;
  for (std::size_t i = 0; i < input.units.size(); ++i) {
    const bool again =
        i > 0 && input.units[i] / given.parts() == input.units[i - 1] / given.parts();
    if (!again) ++rows;
  }
  return elements >= rows &&
         elements < rows + std::max<std::size_t>(1, given.plan.chunk_ends.size());
}

std::string compare_counts(const PropertyCase& given, const Inputs& inputs, const Outcome& outcome,
                           const Expected& expected) {
  if (given.plan.scheme == SchemeId::kDenseRing) return {};  // it counts nothing
  const KnownCounts& first = outcome.ranks[0].counts;
  if (first.union_units != expected.union_units) {
    return "a union of " + std::to_string(first.union_units) + " units, not " +
           std::to_string(expected.union_units);
  }
  const auto& bins = first.histogram;
  if (std::accumulate(bins.begin(), bins.end(), std::uint64_t{0}) != expected.union_units) {
    return "the histogram's bins do not add up to the union";
  }
  for (std::size_t rank = 0; rank < outcome.ranks.size(); ++rank) {
    const KnownCounts& counts = outcome.ranks[rank].counts;
    if (counts.units != first.units || counts.elements != first.elements ||
        counts.union_units != first.union_units || counts.width != given.plan.width ||
        counts.histogram != first.histogram) {
      return "rank " + std::to_string(rank) + " holds other counts than rank 0";
    }
    if (first.units.at(rank) != inputs.ranks[rank].units.size()) {
      return "rank " + std::to_string(rank) + " counts " + std::to_string(first.units[rank]) +
             " units, not " + std::to_string(inputs.ranks[rank].units.size());
    }
    if (!elements_fit(given, inputs.ranks[rank], first.elements.at(rank))) {
      return "rank " + std::to_string(rank) + " counts " + std::to_string(first.elements[rank]) +
             " elements or rows";
    }
  }
  return {};
}

std::string compare_traffic(const Outcome& outcome, const Expected& expected) {
  for (std::size_t rank = 0; rank < outcome.ranks.size(); ++rank) {
    const RankTraffic& wire = outcome.ranks[rank].traffic;
    const RankTraffic& said = expected.traffic[rank];
    if (wire.sent_bytes == said.sent_bytes && wire.received_bytes == said.received_bytes) continue;
    std::ostringstream text;
    text << "rank " << rank << " sent " << wire.sent_bytes << " and received "
         << wire.received_bytes << " bytes; traffic() says " << said.sent_bytes << " and "
         << said.received_bytes;
    return text.str();
  }
  return {};
}

}  // namespace

std::string compare(const PropertyCase& given, const Inputs& inputs, const Outcome& outcome,
                    const Expected& expected) {
  if (!outcome.error.empty()) return outcome.error;
  std::string what = compare_result(given, inputs, outcome, expected);
  if (what.empty()) what = compare_memory(given, inputs, outcome);
  if (what.empty()) what = compare_counts(given, inputs, outcome, expected);
  if (what.empty()) what = compare_traffic(outcome, expected);
  return what;
}

std::string failure_of(const PropertyCase& given, RankPool& pool) {
  Inputs inputs = make_inputs(given);
  const Expected expected = oracle(given, inputs);
  const Outcome outcome = run_case(given, inputs, pool);
  return compare(given, inputs, outcome, expected);
}

}  // namespace zensync::test
