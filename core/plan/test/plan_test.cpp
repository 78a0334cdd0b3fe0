// Choosing plans, by tables: thresholds, hysteresis, probes, elements or rows, parts of rows,
// chunks, names. Place: tests of plan. Expectations are those of the design; all functions are
// pure, so no engine is needed.
#include "zensync/plan/plan.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

namespace zensync::test {
namespace {

constexpr TensorSpec kVector{100000, 1, DType::kF32, Layout::kDense};
constexpr TensorSpec kTable{10000, 64, DType::kF32, Layout::kDense};
constexpr TensorSpec kCooTable{10000, 64, DType::kF32, Layout::kCoo};

KnownCounts counts_of(std::vector<std::uint64_t> units, std::vector<std::uint64_t> elements,
                      std::uint64_t width) {
  KnownCounts counts;
  counts.union_units = std::accumulate(units.begin(), units.end(), std::uint64_t{0});
  counts.units = std::move(units);
  counts.elements = std::move(elements);
  counts.width = width;
  return counts;
}

TensorState state_after(const TensorSpec& spec, KnownCounts counts, TensorState state = {}) {
  after_sparse(spec, PlanOptions(), std::move(counts), state);
  return state;
}

TEST(Names, GoThereAndBack) {
  for (int i = 0; i <= static_cast<int>(SchemeId::kDense); ++i) {
    const auto id = static_cast<SchemeId>(i);
    const auto back = scheme_from_name(scheme_name(id));
    ASSERT_TRUE(back.ok());
    EXPECT_EQ(back.value(), id);
  }
  const auto unknown = scheme_from_name("balance");
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().kind, ErrorKind::kInvalid);
  EXPECT_NE(unknown.error().message.find("recursive_doubling"), std::string::npos);
}

/// Rows that are known beforehand (`rows=`) are not searched, so their elements are not counted:
/// the unit stays the row, and density is that of the rows.
TEST(Widths, StayRowsWhileElementsAreNotCounted) {
  const Plan first = make_plan(kTable, 4, TensorState(), PlanOptions());
  ASSERT_GT(first.width, 1U);
  const std::uint64_t parts = kTable.row_elems / first.width;
  const TensorState sparse =
      state_after(kTable, counts_of({100 * parts, 90 * parts}, {0, 0}, first.width));
  EXPECT_FALSE(sparse.elements);
  EXPECT_FALSE(sparse.dense);
  EXPECT_GT(make_plan(kTable, 4, sparse, PlanOptions()).width, 1U);
  const TensorState dense =
      state_after(kTable, counts_of({2000 * parts, 90 * parts}, {0, 0}, first.width));
  EXPECT_TRUE(dense.dense) << "a fifth of the rows";
}

TEST(Thresholds, ToDenseAboveTheLargestDensity) {
  struct Row {
    std::vector<std::uint64_t> units;
    bool is_dense;
  };
  for (const Row& row :
       {Row{{100, 100, 100}, false}, Row{{15000, 15000, 15000}, false}, Row{{100, 15001, 0}, true},
        Row{{15001, 15001, 15001}, true}, Row{{0, 0, 0}, false}, Row{{100000, 0, 0}, true}}) {
    EXPECT_EQ(state_after(kVector, counts_of(row.units, {0, 0, 0}, 1)).dense, row.is_dense)
        << row.units[1];
  }
  PlanOptions strict;
  strict.to_dense_above = 0.01;
  TensorState state;
  after_sparse(kVector, strict, counts_of({1001, 0}, {0, 0}, 1), state);
  EXPECT_TRUE(state.dense);
}

TEST(Thresholds, RowsOfACooTableCountByRows) {
  // Units are parts of rows: 1600 of 10000 rows at 8 parts.
  EXPECT_TRUE(state_after(kCooTable, counts_of({1600 * 8, 8}, {1600 * 64, 64}, 8)).dense);
  EXPECT_FALSE(state_after(kCooTable, counts_of({1400 * 8, 8}, {1400 * 64, 64}, 8)).dense);
}

std::vector<JobHeader> probes(std::vector<double> row_shares, double elem_share) {
  std::vector<JobHeader> headers;
  for (double share : row_shares) {
    JobHeader header;
    header.probe_rows = 1000;
    header.probe_nonzero_rows = static_cast<std::uint32_t>(1000 * share);
    header.probe_nonzero_elems = static_cast<std::uint32_t>(1000 * 64 * elem_share);
    headers.push_back(header);
  }
  return headers;
}

TEST(Thresholds, BackToSparseBelowAndOnlyByAProbe) {
  const PlanOptions options;
  TensorState state = state_after(kTable, counts_of({9000, 100}, {9000 * 64, 6400}, 64));
  ASSERT_TRUE(state.dense);
  after_dense(kTable, options, std::vector<JobHeader>(2), state);
  EXPECT_TRUE(state.dense) << "no probe";
  after_dense(kTable, options, probes({0.12, 0.01}, 0.12), state);
  EXPECT_TRUE(state.dense) << "0.12 lies between the thresholds";
  after_dense(kTable, options, probes({0.02, 0.5}, 0.5), state);
  EXPECT_TRUE(state.dense) << "the densest rank counts";
  std::vector<JobHeader> partly = probes({0.01, 0.01}, 0.01);
  partly[1].probe_rows = 0;
  after_dense(kTable, options, partly, state);
  EXPECT_TRUE(state.dense) << "one rank did not sample";
  after_dense(kTable, options, probes({0.09, 0.05}, 0.09), state);
  EXPECT_FALSE(state.dense);
  EXPECT_EQ(make_plan(kTable, 4, state, options).width > 1, true);
}

/// Dense rows full of zeros: sparse again, by elements.
TEST(Thresholds, BackToSparseByElements) {
  TensorState state = state_after(kTable, counts_of({9000, 9000}, {9000 * 64, 9000 * 64}, 64));
  ASSERT_TRUE(state.dense);
  after_dense(kTable, PlanOptions(), probes({0.9, 0.9}, 0.02), state);
  EXPECT_FALSE(state.dense);
  EXPECT_EQ(make_plan(kTable, 4, state, PlanOptions()).width, 1U);
  TensorState coo;
  coo.dense = true;
  after_dense(kCooTable, PlanOptions(), probes({0.9, 0.9}, 0.02), coo);
  EXPECT_TRUE(coo.dense) << "a COO tensor has rows only";
}

TEST(Thresholds, OneProbeInEvery64Rounds) {
  TensorState state;
  state.dense = true;
  int due = 0;
  int last = -1;
  for (int round = 0; round < 640; ++round) {
    if (probe_is_due(state)) {
      EXPECT_TRUE(last < 0 || round - last == 64) << round << " after " << last;
      last = round;
      ++due;
    }
    after_dense(kTable, PlanOptions(), std::vector<JobHeader>(2), state);
  }
  EXPECT_EQ(due, 10);
}

/// Rows that are mostly zeros inside are sent by elements; rows that are full, by parts of rows.
TEST(Width, ElementsOrRows) {
  struct Row {
    std::uint64_t rows;
    std::uint64_t elements;
    bool by_elements;
  };
  for (const Row& row : {Row{500, 500 * 64, false}, Row{500, 500 * 60, false},
                         Row{500, 500 * 2, true}, Row{500, 500 * 10, true}}) {
    TensorState state =
        state_after(kTable, counts_of({row.rows, row.rows}, {row.elements, row.elements}, 64));
    EXPECT_EQ(make_plan(kTable, 4, state, PlanOptions()).width == 1, row.by_elements)
        << row.elements;
    if (!row.by_elements) continue;
    // By elements it stays while rows are mostly zeros (width 1: `elements` holds rows), else goes
    // back.
    state = state_after(kTable, counts_of({row.elements, 1}, {row.rows, 1}, 1), state);
    EXPECT_EQ(make_plan(kTable, 4, state, PlanOptions()).width, 1U);
    state = state_after(kTable, counts_of({500 * 64, 500 * 64}, {500, 500}, 1), state);
    EXPECT_GT(make_plan(kTable, 4, state, PlanOptions()).width, 1U);
  }
  TensorState coo = state_after(kCooTable, counts_of({500, 500}, {1000, 1000}, 64));
  EXPECT_GT(make_plan(kCooTable, 4, coo, PlanOptions()).width, 1U) << "COO goes by rows";
}

/// 90 % of the rows touched, 1 % of the elements: sparse by elements, not dense.
TEST(Width, DensityIsThatOfTheUnitsTheNextJobUses) {
  const TensorState state = state_after(kTable, counts_of({9000, 9000}, {6400, 6400}, 64));
  EXPECT_FALSE(state.dense);
  EXPECT_EQ(make_plan(kTable, 4, state, PlanOptions()).width, 1U);
}

TEST(Parts, TheDesignsExample) {
  const TensorSpec table{151936, 64, DType::kF32, Layout::kDense};
  for (double rows : {500.0, 1000.0, 2000.0, 4000.0}) EXPECT_EQ(choose_parts(table, 8, rows), 8U);
}

TEST(Parts, AreAsAskedWhereTheyDivideTheRow) {
  PlanOptions options;
  const std::uint64_t own = make_plan(kTable, 4, TensorState(), options).width;
  options.parts = 2;
  EXPECT_EQ(make_plan(kTable, 4, TensorState(), options).width, kTable.row_elems / 2);
  options.parts = kTable.row_elems + 1;
  EXPECT_EQ(make_plan(kTable, 4, TensorState(), options).width, own);
}

TEST(Parts, DivideTheRow) {
  for (std::uint64_t row_elems = 1; row_elems <= 200; ++row_elems) {
    const TensorSpec spec{1000, row_elems, DType::kF32, Layout::kDense};
    for (int size : {1, 2, 3, 7, 8, 16, 128}) {
      for (double rows : {1.0, 100.0, 1e6}) {
        const std::uint64_t parts = choose_parts(spec, size, rows);
        ASSERT_GE(parts, 1U);
        ASSERT_EQ(row_elems % parts, 0U);
        TensorState state;
        ASSERT_EQ(row_elems % make_plan(spec, size, state, PlanOptions()).width, 0U);
      }
    }
  }
}

/// The stated formula, for table cells far from a tie: few wide rows are cut, many narrow ones are
/// not.
TEST(Parts, FollowTheFormula) {
  const TensorSpec wide{10000, 1024, DType::kF32, Layout::kDense};
  const TensorSpec narrow{10000000, 4, DType::kF16, Layout::kDense};
  EXPECT_GT(choose_parts(wide, 16, 20), 8U);
  EXPECT_EQ(choose_parts(narrow, 5, 1e6), 1U);
  const TensorSpec odd{10000, 7, DType::kF32, Layout::kDense};
  EXPECT_TRUE(choose_parts(odd, 8, 100) == 1 || choose_parts(odd, 8, 100) == 7);
}

/// Payload of each chunk by the histogram, spread evenly within a bin.
std::vector<double> payloads(const Plan& plan, const std::vector<std::uint64_t>& histogram) {
  const auto slots = static_cast<double>(plan.chunk_ends.back());
  const auto units_before = [&](double slot) {
    const double place = slot / slots * static_cast<double>(kHistogramBins);
    double units = 0;
    for (std::size_t bin = 0; bin < histogram.size(); ++bin) {
      const double share = std::clamp(place - static_cast<double>(bin), 0.0, 1.0);
      units += share * static_cast<double>(histogram[bin]);
    }
    return units;
  };
  std::vector<double> result;
  double before = 0;
  for (std::uint64_t end : plan.chunk_ends) {
    result.push_back(units_before(static_cast<double>(end)) - before);
    before = units_before(static_cast<double>(end));
  }
  return result;
}

/// Counts of a large vector whose union is densest at the front.
KnownCounts front_counts(std::uint64_t slope) {
  KnownCounts counts = counts_of(std::vector<std::uint64_t>(4, 400000), {0, 0, 0, 0}, 1);
  counts.union_units = 0;
  for (std::uint64_t bin = 0; bin < kHistogramBins; ++bin) {
    counts.histogram.push_back(20000 / (1 + slope * bin));
    counts.union_units += counts.histogram.back();
  }
  return counts;
}

void expect_ends(const Plan& plan, std::uint64_t slots) {
  ASSERT_FALSE(plan.chunk_ends.empty());
  EXPECT_EQ(plan.chunk_ends.back(), slots);
  for (std::size_t i = 1; i < plan.chunk_ends.size(); ++i) {
    EXPECT_LT(plan.chunk_ends[i - 1], plan.chunk_ends[i]);
  }
}

TEST(Chunks, CarryEqualPayload) {
  const TensorSpec spec{8000003, 1, DType::kF32, Layout::kDense};
  PlanOptions options;
  options.scheme = SchemeId::kBalanced;
  for (std::uint64_t slope : {0, 1}) {
    TensorState state;
    state.counts = front_counts(slope);
    options.max_bytes = slope == 0 ? 0 : 1 << 20;
    const Plan plan = make_plan(spec, 4, state, options);
    expect_ends(plan, div_ceil(spec.rows, 4));
    ASSERT_GT(plan.chunk_ends.size(), 4U);
    const std::vector<double> parts = payloads(plan, state.counts.histogram);
    const double mean = static_cast<double>(state.counts.union_units) / parts.size();
    for (double part : parts) EXPECT_NEAR(part, mean, 0.02 * mean);
  }
}

TEST(Chunks, EqualSlotsWithoutAHistogramAndOneWhenAsked) {
  const TensorSpec spec{80000000, 1, DType::kF32, Layout::kDense};
  PlanOptions options;
  options.scheme = SchemeId::kBalanced;
  const Plan plan = make_plan(spec, 8, TensorState(), options);
  expect_ends(plan, 10000000);
  ASSERT_GT(plan.chunk_ends.size(), 1U);
  const double wanted = 1e7 / plan.chunk_ends.size();
  EXPECT_NEAR(static_cast<double>(plan.chunk_ends[0]), wanted, 2);
  options.overlap = false;
  EXPECT_EQ(make_plan(spec, 8, TensorState(), options).chunk_ends.size(), 1U);
  options.max_bytes = 200'000'000;  // six times 320 MB is wanted where nothing is known
  EXPECT_EQ(make_plan(spec, 8, TensorState(), options).chunk_ends.size(), 10U);
  options.single_chunk = true;
  EXPECT_EQ(make_plan(spec, 8, TensorState(), options).chunk_ends.size(), 1U);
}

TEST(Chunks, PullMessagesAreLongEnoughAndMemoryBoundsThem) {
  PlanOptions options;
  options.scheme = SchemeId::kBalanced;
  TensorState state;
  state.counts = counts_of({1000, 1000, 1000, 1000}, {0, 0, 0, 0}, 1);  // 4 kB per owner
  EXPECT_EQ(make_plan(kVector, 4, state, options).chunk_ends.size(), 1U);
  std::size_t last = 1;
  for (std::uint64_t bound : {1 << 20, 1 << 16, 1 << 14, 1 << 12}) {
    options.max_bytes = bound;
    const std::size_t chunks = make_plan(kVector, 4, state, options).chunk_ends.size();
    EXPECT_GE(chunks, last);
    last = chunks;
  }
  EXPECT_GT(last, 4U);
}

TEST(Scheme, FixedOnesStayAndAutoFollowsTheState) {
  TensorState dense;
  dense.dense = true;
  PlanOptions options;
  EXPECT_EQ(make_plan(kVector, 4, dense, options).scheme, SchemeId::kDense);
  EXPECT_EQ(make_plan(kVector, 4, TensorState(), options).scheme, SchemeId::kBalanced);
  for (SchemeId id : {SchemeId::kBalanced, SchemeId::kRecursiveDoubling, SchemeId::kAgSparse,
                      SchemeId::kDenseRing, SchemeId::kDense}) {
    options.scheme = id;
    EXPECT_EQ(make_plan(kVector, 4, dense, options).scheme, id);
    EXPECT_EQ(make_plan(kVector, 4, TensorState(), options).scheme, id);
  }
}

/// Equal inputs give equal plans and digests; each part of a plan changes the digest.
TEST(Scheme, PlansAreDeterministicAndDigestsTellThemApart) {
  TensorState state = state_after(kTable, counts_of({500, 400, 1}, {32000, 25600, 64}, 64));
  const Plan a = make_plan(kTable, 3, state, PlanOptions());
  const Plan b = make_plan(kTable, 3, state, PlanOptions());
  EXPECT_EQ(a.chunk_ends, b.chunk_ends);
  EXPECT_EQ(plan_digest(a), plan_digest(b));
  Plan scheme = a;
  scheme.scheme = SchemeId::kDenseRing;
  Plan width = a;
  width.width += 1;
  Plan chunks = a;
  chunks.chunk_ends.push_back(5);
  Plan other_end = chunks;
  other_end.chunk_ends.back() = 6;
  std::vector<std::uint64_t> digests;
  for (const Plan& plan : {a, scheme, width, chunks, other_end})
    digests.push_back(plan_digest(plan));
  std::sort(digests.begin(), digests.end());
  EXPECT_EQ(std::unique(digests.begin(), digests.end()), digests.end());
}

TEST(Scheme, DegenerateTensorsHavePlans) {
  for (const TensorSpec& spec :
       {TensorSpec{0, 1, DType::kF32, Layout::kDense},
        TensorSpec{5, 0, DType::kF32, Layout::kDense}, TensorSpec{0, 0, DType::kF32, Layout::kCoo},
        TensorSpec{1, 1, DType::kI64, Layout::kCoo}}) {
    for (int size : {1, 2, 9}) {
      TensorState state;
      const Plan plan = make_plan(spec, size, state, PlanOptions());
      EXPECT_TRUE(plan.scheme != SchemeId::kBalanced || !plan.chunk_ends.empty());
      after_sparse(spec, PlanOptions(), counts_of(std::vector<std::uint64_t>(size), {}, 1), state);
      EXPECT_FALSE(state.dense);
      make_plan(spec, size, state, PlanOptions());
    }
  }
}

}  // namespace
}  // namespace zensync::test
