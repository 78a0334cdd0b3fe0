// Every scheme, n = 1–9, every dtype, storage and pattern: the result is the dense sum bit for bit,
// on all ranks, and again in fresh engines. Place: tests of the engine (they need a driver). Inputs
// are small integers, whose sums are exact in any order, so one oracle serves all schemes.
#include <gtest/gtest.h>

#include <tuple>

#include "group.hpp"

namespace zensync::test {
namespace {

struct Form {
  Storage storage;
  std::uint64_t rows;
  std::uint64_t row_elems;
};
/// Primes, so that no n divides them.
constexpr Form kForms[] = {{Storage::kDense, 2503, 1},       {Storage::kDense, 701, 3},
                           {Storage::kDense, 131, 16},       {Storage::kDense, 53, 64},
                           {Storage::kDenseIds, 131, 16},    {Storage::kCoo, 2503, 1},
                           {Storage::kCoo, 131, 16},         {Storage::kCooDuplicates, 701, 3},
                           {Storage::kCooDuplicates, 53, 64}};

using Param = std::tuple<SchemeId, int>;

std::string param_name(const ::testing::TestParamInfo<Param>& info) {
  return std::string(scheme_name(std::get<0>(info.param))) + "_n" +
         std::to_string(std::get<1>(info.param));
}

class Matrix : public ::testing::TestWithParam<Param> {
 protected:
  SchemeId scheme() const { return std::get<0>(GetParam()); }
  int size() const { return std::get<1>(GetParam()); }

  /// Whether the scheme takes the case: dense_ring knows dense-stored tensors only.
  bool takes(Storage storage) const { return scheme() != SchemeId::kDenseRing || !is_coo(storage); }

  void run(const CaseSpec& spec, Group& first, Group& second) {
    Case job = make_case(spec);
    Case again = job;
    const Sum expected = oracle(job);
    std::string name = std::to_string(jobs_run_++);
    name += " of the matrix";
    Jobs jobs;
    Jobs jobs_again;
    ASSERT_TRUE(first.run(job, name, jobs));
    ASSERT_TRUE(second.run(again, name, jobs_again));
    for (int rank = 0; rank < size(); ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      ASSERT_TRUE(holds(job, rank, *jobs[r], expected)) << label(spec) << " rank " << rank;
      ASSERT_TRUE(holds(again, rank, *jobs_again[r], expected)) << "again: " << label(spec);
      ASSERT_EQ(jobs[r]->report().scheme, scheme());
      ASSERT_EQ(jobs[r]->report().union_units, jobs[0]->report().union_units);
    }
  }

  int jobs_run_ = 0;
};

TEST_P(Matrix, IsTheDenseSum) {
  Group first(size(), options_of(scheme()));
  Group second(size(), options_of(scheme()));
  for (const Form& form : kForms) {
    if (!takes(form.storage)) continue;
    for (DType dtype : kAllDTypes) {
      for (Pattern pattern : kAllPatterns) {
        CaseSpec spec{size(), dtype, form.storage, form.rows, form.row_elems, pattern};
        spec.seed = static_cast<std::uint64_t>(jobs_run_) + 17;
        ASSERT_NO_FATAL_FAILURE(run(spec, first, second));
      }
    }
  }
}

TEST_P(Matrix, SizesThatNDoesNotDivide) {
  Group first(size(), options_of(scheme()));
  Group second(size(), options_of(scheme()));
  for (std::uint64_t rows = 0; rows <= 20; ++rows) {
    for (Pattern pattern : {Pattern::kFull, Pattern::kEnds, Pattern::kOneHot}) {
      CaseSpec spec{size(), DType::kF32, Storage::kDense, rows, rows % 3 + 1, pattern};
      spec.seed = rows + 1;
      ASSERT_NO_FATAL_FAILURE(run(spec, first, second));
      if (!takes(Storage::kCoo)) continue;
      spec.storage = Storage::kCoo;
      ASSERT_NO_FATAL_FAILURE(run(spec, first, second));
    }
  }
}

TEST_P(Matrix, TensorsWithoutElements) {
  Group first(size(), options_of(scheme()));
  Group second(size(), options_of(scheme()));
  const std::uint64_t shapes[][2] = {{0, 1}, {0, 64}, {0, 0}, {5, 0}};
  for (const auto& shape : shapes) {
    for (Storage storage : {Storage::kDense, Storage::kDenseIds, Storage::kCoo}) {
      if (!takes(storage)) continue;
      CaseSpec spec{size(), DType::kF32, storage, shape[0], shape[1], Pattern::kEmpty};
      ASSERT_NO_FATAL_FAILURE(run(spec, first, second));
    }
  }
}

/// Several blocks of slots per owner, in all patterns (ragged: rank k sends min(10^k, 10^6)
/// elements).
class ManyBlocks : public Matrix {};
TEST_P(ManyBlocks, IsTheDenseSum) {
  Group first(size(), options_of(scheme()));
  Group second(size(), options_of(scheme()));
  for (Pattern pattern : kAllPatterns) {
    const bool is_ragged = pattern == Pattern::kRagged;
    CaseSpec spec{size(), DType::kF32, Storage::kDense, is_ragged ? 1000003U : 250007U, 1, pattern};
    ASSERT_NO_FATAL_FAILURE(run(spec, first, second));
    if (is_ragged || !takes(Storage::kCoo)) continue;
    spec.storage = Storage::kCoo;
    ASSERT_NO_FATAL_FAILURE(run(spec, first, second));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Matrix,
                         ::testing::Combine(::testing::ValuesIn(kSchemes), ::testing::Range(1, 10)),
                         param_name);
INSTANTIATE_TEST_SUITE_P(All, ManyBlocks,
                         ::testing::Combine(::testing::ValuesIn(kSchemes), ::testing::Values(2, 7)),
                         param_name);

/// One flipped bit in a result, a missing row, another rank's bits: the comparison must see each.
TEST(MatrixControl, AWrongResultIsSeen) {
  for (Storage storage : {Storage::kDense, Storage::kCoo}) {
    Case job = make_case({3, DType::kF32, storage, 101, 3, Pattern::kUniform});
    Group group(3, options_of(SchemeId::kBalanced));
    Jobs jobs;
    ASSERT_TRUE(group.run(job, "t", jobs));
    const Sum right = oracle(job);
    ASSERT_TRUE(holds(job, 1, *jobs[1], right));
    Sum wrong = right;
    (storage == Storage::kDense ? wrong.dense : wrong.values)[7] ^= std::byte{1};
    EXPECT_FALSE(holds(job, 1, *jobs[1], wrong));
    if (storage == Storage::kDense) continue;
    wrong = right;
    wrong.rows[1] += 1;
    EXPECT_FALSE(holds(job, 1, *jobs[1], wrong));
  }
}

}  // namespace
}  // namespace zensync::test
