// The pure functions that choose how one tensor is synchronised.
// Place: plan, level 4. A plan is a function of integers that every rank holds (shapes, and counts
// that travelled with earlier jobs), never of clocks, so that all ranks and all repetitions choose
// alike. Only +, −, ×, ÷ and square roots of doubles, which IEEE 754 rounds correctly everywhere.
// Owner: no state here; a TensorState belongs to the engine and is changed only by the calls that
// take one. Threads: any, on structs that no one else writes.
// Nothing fails but `scheme_from_name` (kInvalid), and std::bad_alloc from vectors.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "zensync/base/plan.hpp"
#include "zensync/base/result.hpp"
#include "zensync/codec/headers.hpp"

namespace zensync {

std::string_view scheme_name(SchemeId id);
/// kInvalid, with the list of names, for an unknown one.
Result<SchemeId> scheme_from_name(std::string_view name);

/// Equal plans have equal digests; headers carry it, so that ranks that chose otherwise are found.
std::uint64_t plan_digest(const Plan& plan);

struct PlanOptions {
  SchemeId scheme = SchemeId::kAuto;
  /// A target for the workspace of `balanced` (more chunks), not a hard bound; 0: none.
  std::uint64_t max_bytes = 0;
  double to_dense_above = 0.15;  ///< largest density over ranks
  double to_sparse_below = 0.10;
  bool single_chunk = false;
  std::uint64_t parts = 0;  ///< units per row where it divides the row; 0: as the counts advise
  bool overlap = true;  ///< more chunks than `max_bytes` asks for, to overlap computing and sending
};

/// What is remembered of one tensor between jobs; equal on all ranks.
struct TensorState {
  KnownCounts counts;
  bool dense = false;              ///< it goes through a dense all-reduce, outside the core
  bool elements = false;           ///< its units are single elements though it has rows
  std::uint64_t dense_rounds = 0;  ///< dense jobs since it became dense
};

/// Chooses scheme, width and chunks.
Plan make_plan(const TensorSpec& spec, int size, const TensorState& state,
               const PlanOptions& options);

/// Dense rounds between two probes of a dense tensor.
inline constexpr std::uint64_t kProbeEvery = 64;
inline bool probe_is_due(const TensorState& state) { return state.dense_rounds % kProbeEvery == 1; }

/// The state after a sparse job whose counts are in `counts`.
void after_sparse(const TensorSpec& spec, const PlanOptions& options, KnownCounts counts,
                  TensorState& state);
/// The state after a dense round; `headers` are all ranks' (with samples, if a probe was due).
void after_dense(const TensorSpec& spec, const PlanOptions& options,
                 std::span<const JobHeader> headers, TensorState& state);

/// Bytes that the busiest rank sends or receives, estimated from counts: overlap is modelled as
/// chance within an effective support whose size makes the known union come out.
double estimate_bytes(const TensorSpec& spec, int size, const KnownCounts& counts, SchemeId scheme);

/// Parts per row: c minimises (1 + k·√(n/(m·c)))·(1 + c·i/w), for m non-zero rows of w bytes, i
/// index bytes a unit; divides row_elems. `rows` = m.
std::uint64_t choose_parts(const TensorSpec& spec, int size, double rows);

}  // namespace zensync
