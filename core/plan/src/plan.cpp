// Choosing scheme, width and chunks, and what is remembered after a job. Place: plan, level 4.
// Pure functions of integers that all ranks hold; tested by tables.
#include "zensync/plan/plan.hpp"

#include <algorithm>
#include <cmath>

#include "zensync/base/hash.hpp"

namespace zensync {
namespace {

/// The others work and send in turns where the chunks of `balanced` do both at once: they must send
/// so much less to be as quick (docs/adr/0009).
constexpr double kWithoutOverlap = 0.75;
constexpr std::string_view kNames[] = {"auto",     "balanced",   "recursive_doubling",
                                       "agsparse", "dense_ring", "dense"};

/// Pull messages of a chunk are at least this long where the payload allows (design: chunks by
/// payload).
constexpr double kPullBytes = 64 * 1024;
constexpr std::uint64_t kMaxChunks = 8;
constexpr std::uint64_t kMaxBoundedChunks = 4096;
/// A message counts its units in 32 bits: a tensor with more slots a chunk is cut evenly, below
/// that.
constexpr std::uint64_t kMaxChunkSlots = 1ULL << 31;
/// Bytes of an index entry of a single element, about: Elias–Fano's 2 + log2(1/d) bits at d = 3 %.
constexpr double kElementIndexBytes = 0.9;
/// Shares assumed while nothing is known.
constexpr double kGuessedDensity = 0.01;
constexpr double kGuessedUnion = 0.08;

double mean(const std::vector<std::uint64_t>& values) {
  double total = 0;
  for (std::uint64_t value : values) total += static_cast<double>(value);
  return values.empty() ? 0 : total / static_cast<double>(values.size());
}

double largest(const std::vector<std::uint64_t>& values) {
  return values.empty() ? 0 : static_cast<double>(*std::max_element(values.begin(), values.end()));
}

/// Imbalance constant k of choose_parts: about the largest of n standard normal values that is to
/// be expected (1.4 at 8, 1.8 at 16, 2.5 at 128), linear in between.
double spread_of(int size) {
  if (size <= 8) return 1.4;
  if (size <= 16) return 1.4 + 0.4 * (size - 8) / 8;
  return std::min(3.0, 1.8 + 0.7 * (size - 16) / 112);
}

std::uint64_t choose_width(const TensorSpec& spec, int size, const TensorState& state,
                           const PlanOptions& options) {
  if (spec.row_elems <= 1) return 1;
  if (options.parts != 0 && spec.row_elems % options.parts == 0) {
    return spec.row_elems / options.parts;
  }
  if (spec.layout == Layout::kDense && state.elements) return 1;
  double rows = kGuessedDensity * static_cast<double>(spec.rows);
  if (state.counts.known()) {
    rows = state.counts.width == 1
               ? mean(state.counts.elements)
               : mean(state.counts.units) * static_cast<double>(state.counts.width) /
                     static_cast<double>(spec.row_elems);
  }
  return spec.row_elems / choose_parts(spec, size, std::max(rows, 1.0));
}

/// Chunks that keep pull messages long enough, and the workspace within its bound.
std::uint64_t choose_chunk_count(const TensorSpec& spec, int size, const TensorState& state,
                                 const PlanOptions& options) {
  const auto dense = static_cast<double>(spec.dense_bytes());
  const auto per_elem = static_cast<double>(dtype_bytes(spec.dtype)) * state.counts.width;
  const bool known = state.counts.known();
  const double pull = known ? per_elem * state.counts.union_units : kGuessedUnion * dense;
  const double push = known ? per_elem * largest(state.counts.units) : kGuessedDensity * dense;
  const double wanted = pull / size / kPullBytes;
  auto chunks = static_cast<std::uint64_t>(std::clamp(wanted, 1.0, double{kMaxChunks}));
  if (!options.overlap) chunks = 1;
  if (options.max_bytes != 0) {
    // Own push twice, all pushes received, own pull twice, all pulls received; nothing known: all
    // dense.
    const double whole = known ? 3 * push + 3 * pull : 6 * dense;
    const double least = whole / static_cast<double>(options.max_bytes);
    chunks = std::max(chunks, static_cast<std::uint64_t>(
                                  std::clamp(std::ceil(least), 1.0, double{kMaxBoundedChunks})));
  }
  return options.single_chunk ? 1 : chunks;
}

/// Ends of chunks that carry equal payload by the histogram of the last union (equal slots if there
/// is none).
std::vector<std::uint64_t> cut_chunks(std::uint64_t slots, std::uint64_t chunks,
                                      const std::vector<std::uint64_t>& histogram) {
  std::vector<std::uint64_t> ends;
  double total = 0;
  for (std::uint64_t units : histogram) total += static_cast<double>(units);
  double before = 0;
  std::size_t bin = 0;
  for (std::uint64_t chunk = 1; chunk < chunks; ++chunk) {
    double share = static_cast<double>(chunk) / static_cast<double>(chunks);
    if (total > 0) {
      const double wanted = share * total;
      while (bin < histogram.size() && before + static_cast<double>(histogram[bin]) < wanted) {
        before += static_cast<double>(histogram[bin++]);
      }
      const double inside = bin < histogram.size() && histogram[bin] != 0
                                ? (wanted - before) / static_cast<double>(histogram[bin])
                                : 0.0;
      share = (static_cast<double>(bin) + inside) / static_cast<double>(kHistogramBins);
    }
    const auto end =
        std::min(slots, static_cast<std::uint64_t>(share * static_cast<double>(slots)));
    if (end != 0 && end < slots && (ends.empty() || end > ends.back())) ends.push_back(end);
  }
  ends.push_back(slots);
  return ends;
}

SchemeId choose_scheme(const TensorSpec& spec, int size, const TensorState& state,
                       const PlanOptions& options) {
  const bool gigantic = spec.layout == Layout::kDense && spec.elems() > kMaxChunkSlots;
  if (size == 1 || !state.counts.known() || gigantic) return SchemeId::kBalanced;
  SchemeId best = SchemeId::kBalanced;
  double least = estimate_bytes(spec, size, state.counts, best);
  if (choose_chunk_count(spec, size, state, options) > 1) least *= kWithoutOverlap;
  for (SchemeId id : {SchemeId::kRecursiveDoubling, SchemeId::kAgSparse}) {
    const double bytes = estimate_bytes(spec, size, state.counts, id);
    if (bytes >= least) continue;
    best = id;
    least = bytes;
  }
  return best;
}

}  // namespace

std::string_view scheme_name(SchemeId id) { return kNames[static_cast<int>(id)]; }

Result<SchemeId> scheme_from_name(std::string_view name) {
  std::string known;
  for (int i = 0; i < static_cast<int>(std::size(kNames)); ++i) {
    if (kNames[i] == name) return static_cast<SchemeId>(i);
    known += (i == 0 ? "" : ", ") + std::string(kNames[i]);
  }
  return make_error(ErrorKind::kInvalid,
                    "no scheme is called '" + std::string(name) + "'; there are " + known);
}

std::uint64_t plan_digest(const Plan& plan) {
  std::uint64_t digest = mix64(static_cast<std::uint64_t>(plan.scheme) + 1);
  digest = mix64(digest ^ plan.width);
  for (std::uint64_t end : plan.chunk_ends) digest = mix64(digest ^ end);
  return digest;
}

std::uint64_t choose_parts(const TensorSpec& spec, int size, double rows) {
  const auto row_bytes = static_cast<double>(spec.row_elems * dtype_bytes(spec.dtype));
  std::uint64_t best = 1;
  double least = 0;
  for (std::uint64_t parts = 1; parts <= std::min<std::uint64_t>(spec.row_elems, 64); ++parts) {
    if (spec.row_elems % parts != 0) continue;
    const double spread = parts == static_cast<std::uint64_t>(size) ? 0.0 : spread_of(size);
    const double imbalance = 1 + spread * std::sqrt(size / (rows * static_cast<double>(parts)));
    const double cost =
        imbalance * (1 + static_cast<double>(parts) * kElementIndexBytes / row_bytes);
    if (parts != 1 && cost >= least) continue;
    best = parts;
    least = cost;
  }
  return best;
}

Plan make_plan(const TensorSpec& spec, int size, const TensorState& state,
               const PlanOptions& options) {
  Plan plan;
  plan.scheme = options.scheme;
  if (plan.scheme == SchemeId::kAuto) {
    plan.scheme = state.dense ? SchemeId::kDense : choose_scheme(spec, size, state, options);
  }
  plan.width = choose_width(spec, size, state, options);
  const std::uint64_t units = spec.elems() / std::max<std::uint64_t>(plan.width, 1);
  if (plan.scheme == SchemeId::kBalanced) {
    const std::uint64_t slots = div_ceil(units, static_cast<std::uint64_t>(size));
    const std::uint64_t chunks = choose_chunk_count(spec, size, state, options);
    const bool gigantic = slots > kMaxChunkSlots && spec.layout == Layout::kDense;
    plan.chunk_ends = gigantic ? cut_chunks(slots, std::max(chunks, slots / kMaxChunkSlots + 1), {})
                               : cut_chunks(slots, chunks, state.counts.histogram);
  }
  return plan;
}

void after_sparse(const TensorSpec& spec, const PlanOptions& options, KnownCounts counts,
                  TensorState& state) {
  state.counts = std::move(counts);
  const KnownCounts& known = state.counts;
  if (!known.known() || spec.elems() == 0) return;
  const double units = static_cast<double>(spec.elems()) / static_cast<double>(known.width);
  const bool counted = largest(known.elements) > 0;  // else elements (width 1: rows) are not known
  if (counted && spec.layout == Layout::kDense && spec.row_elems > 1) {
    const auto elem_bytes = static_cast<double>(dtype_bytes(spec.dtype));
    const double own = mean(known.units);
    const double other = mean(known.elements);
    if (known.width == 1) {
      const double as_rows = other * static_cast<double>(spec.row_elems) * elem_bytes;
      state.elements = as_rows > own * (elem_bytes + kElementIndexBytes);
    } else {
      const double as_rows = own * static_cast<double>(known.width) * elem_bytes;
      state.elements = other * (elem_bytes + kElementIndexBytes) < 0.8 * as_rows;
    }
  }
  // The density that counts is the one of the units that the next job will use.
  const bool switches = counted && (known.width == 1) != (spec.row_elems == 1 || state.elements);
  const double next_units = switches ? (state.elements ? static_cast<double>(spec.elems())
                                                       : static_cast<double>(spec.rows))
                                     : units;
  const double density = largest(switches ? known.elements : known.units) / next_units;
  state.dense = density > options.to_dense_above;
  state.dense_rounds = 0;
}

void after_dense(const TensorSpec& spec, const PlanOptions& options,
                 std::span<const JobHeader> headers, TensorState& state) {
  ++state.dense_rounds;
  double rows = 0;
  double elems = 0;
  for (const JobHeader& header : headers) {
    if (header.probe_rows == 0) return;
    const double sampled = header.probe_rows;
    rows = std::max(rows, header.probe_nonzero_rows / sampled);
    elems = std::max(elems,
                     header.probe_nonzero_elems / (sampled * static_cast<double>(spec.row_elems)));
  }
  if (headers.empty()) return;
  const bool by_rows = rows < options.to_sparse_below;
  const bool by_elems = spec.layout == Layout::kDense && elems < options.to_sparse_below;
  if (!by_rows && !by_elems) return;
  state.dense = false;
  state.elements = !by_rows && spec.row_elems > 1;
  state.counts = KnownCounts();
}

}  // namespace zensync
