// Bits on inexact inputs: one-shot schemes add in rank order and equal each other, recursive
// doubling adds in its fixed tree, AVG divides and rounds once, and how messages are cut or coded
// changes no bit. Place: tests of the engine. Oracles are plain loops over the logical rows.
#include <gtest/gtest.h>

#include "group.hpp"

namespace zensync::test {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kF64, DType::kBF16, DType::kF16};

/// Runs `job` in fresh engines; the dense memory of rank 0, after all ranks were seen to be equal.
std::vector<std::byte> result_of(Case job, const EngineOptions& options) {
  Group group(job.spec.size, options);
  Jobs jobs;
  if (!group.run(job, "tensor", jobs)) return {};
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    EXPECT_TRUE(jobs[r]->status().ok()) << label(job.spec);
    EXPECT_TRUE(same_bytes(job.ranks[0].dense, job.ranks[r].dense, job.spec.dtype))
        << scheme_name(options.scheme) << " rank " << rank << " " << label(job.spec);
  }
  return job.ranks[0].dense;
}

CaseSpec inexact(int size, DType dtype, std::uint64_t row_elems, Pattern pattern) {
  CaseSpec spec{size, dtype, Storage::kDense, 3001 / row_elems, row_elems, pattern};
  spec.values = Values::kInexact;
  spec.density = 0.3;
  spec.seed = static_cast<std::uint64_t>(size) * 100 + row_elems;
  return spec;
}

TEST(Order, OneShotSchemesAddInRankOrder) {
  for (int size : {1, 2, 3, 5, 8, 9}) {
    for (DType dtype : kAllDTypes) {
      for (std::uint64_t row_elems : {1, 16}) {
        for (Pattern pattern : {Pattern::kUniform, Pattern::kFull, Pattern::kIdentical}) {
          for (Storage storage : {Storage::kDense, Storage::kCoo}) {
            CaseSpec spec = inexact(size, dtype, row_elems, pattern);
            spec.storage = storage;
            const Case job = make_case(spec);
            const Sum expected = oracle(job);
            expect_sum(job, options_of(SchemeId::kBalanced), expected);
            expect_sum(job, options_of(SchemeId::kAgSparse), expected);
          }
        }
      }
    }
  }
}

TEST(Order, AvgIsTheSumDividedAndRoundedOnce) {
  for (int size : {1, 3, 5, 7, 8}) {
    for (DType dtype : kFloats) {
      CaseSpec spec = inexact(size, dtype, 3, Pattern::kUniform);
      spec.op = ReduceOp::kAvg;
      for (Storage storage : {Storage::kDense, Storage::kCoo}) {
        spec.storage = storage;
        const Case job = make_case(spec);
        const Sum expected = oracle(job);
        expect_sum(job, options_of(SchemeId::kBalanced), expected);
        expect_sum(job, options_of(SchemeId::kAgSparse), expected);
      }
      spec.storage = Storage::kDense;
      spec.values = Values::kSmallIntegers;
      const Case exact = make_case(spec);
      for (SchemeId scheme : kSchemes) expect_sum(exact, options_of(scheme), oracle(exact));
    }
  }
}

TEST(Order, AvgOfIntegersIsRefused) {
  CaseSpec spec{2, DType::kI32, Storage::kDense, 100, 1, Pattern::kUniform};
  spec.op = ReduceOp::kAvg;
  for (SchemeId scheme : kSchemes) {
    Case job = make_case(spec);
    Group group(2, options_of(scheme));
    Jobs jobs;
    ASSERT_TRUE(group.run(job, "t", jobs));
    for (const auto& done : jobs) {
      ASSERT_FALSE(done->status().ok());
      EXPECT_EQ(done->status().error().kind, ErrorKind::kUnsupported);
    }
  }
}

/// The sum of ranks [lo, hi) of p by halves: lower block + upper block; ranks ≥ p are added to rank
/// − p. No contributor gives no term; `terms` of one element, by rank.
struct Term {
  bool is_there = false;
  double value = 0;
};
Term add_terms(Term a, Term b, DType dtype) {
  if (!a.is_there) return b;
  if (!b.is_there) return a;
  if (dtype == DType::kF64) return {true, a.value + b.value};
  return {true, static_cast<double>(static_cast<float>(a.value) + static_cast<float>(b.value))};
}
Term tree_sum(const std::vector<Term>& terms, std::size_t lo, std::size_t hi, DType dtype) {
  if (hi - lo == 1) return terms[lo];
  const std::size_t middle = (lo + hi) / 2;
  return add_terms(tree_sum(terms, lo, middle, dtype), tree_sum(terms, middle, hi, dtype), dtype);
}

std::vector<std::byte> tree_oracle(const Case& job) {
  const CaseSpec& spec = job.spec;
  std::size_t power = 1;
  while (power * 2 <= job.ranks.size()) power *= 2;
  std::vector<std::byte> result(spec.rows * job.row_bytes());
  for (std::size_t i = 0; i < spec.rows * spec.row_elems; ++i) {
    std::vector<Term> terms(power);
    for (std::size_t rank = 0; rank < job.ranks.size(); ++rank) {
      const std::uint64_t bits = load(job.ranks[rank].dense, i, spec.dtype);
      const Term term{is_nonzero(bits, spec.dtype), value_of(bits, spec.dtype)};
      terms[rank % power] = rank < power ? term : add_terms(terms[rank % power], term, spec.dtype);
    }
    const double sum = tree_sum(terms, 0, power, spec.dtype).value;
    store(result, i, spec.dtype, bits_of(sum + 0.0, spec.dtype));
  }
  return result;
}

TEST(Order, RecursiveDoublingAddsInItsTree) {
  for (int size = 1; size <= 9; ++size) {
    for (DType dtype : kFloats) {
      for (std::uint64_t row_elems : {1, 16}) {
        const Case job = make_case(inexact(size, dtype, row_elems, Pattern::kUniform));
        EXPECT_TRUE(same_bytes(tree_oracle(job),
                               result_of(job, options_of(SchemeId::kRecursiveDoubling)), dtype))
            << label(job.spec);
      }
    }
  }
}

TEST(Order, RecursiveDoublingWrapsIntegers) {
  for (DType dtype : {DType::kI32, DType::kI64}) {
    for (int size : {2, 6}) {
      const Case job = make_case(inexact(size, dtype, 1, Pattern::kFull));
      for (SchemeId scheme : kSchemes) expect_sum(job, options_of(scheme), oracle(job));
    }
  }
}

TEST(Order, DenseRingGivesEqualBitsOnAllRanksAndAgain) {
  for (int size = 1; size <= 9; ++size) {
    for (DType dtype : kFloats) {
      const Case job = make_case(inexact(size, dtype, 1, Pattern::kUniform));
      const auto first = result_of(job, options_of(SchemeId::kDenseRing));
      EXPECT_TRUE(same_bytes(first, result_of(job, options_of(SchemeId::kDenseRing)), dtype));
      if (size > 2) continue;
      EXPECT_TRUE(same_bytes(oracle(job).dense, first, dtype)) << label(job.spec);
    }
  }
}

TEST(Order, CodecPartitionDigestsAndChunksChangeNoBit) {
  for (int size : {2, 5, 8}) {
    CaseSpec spec = inexact(size, DType::kBF16, 1, Pattern::kFront);
    spec.rows = 300007;
    spec.density = 0.02;
    const Case job = make_case(spec);
    const Sum expected = oracle(job);
    for (SchemeId scheme : {SchemeId::kBalanced, SchemeId::kAgSparse}) {
      EngineOptions options = options_of(scheme);
      for (IndexCodec policy : kPolicies) {
        options.wire.codec = policy;
        expect_sum(job, options, expected);
      }
      options.wire = WireOptions();
      options.wire.verify = false;
      expect_sum(job, options, expected);
      options.wire.partition = PartitionKind::kRange;
      expect_sum(job, options, expected);
    }
  }
}

/// A bound on memory cuts a job into many chunks; the bits stay.
TEST(Order, ManyChunksChangeNoBit) {
  for (Storage storage : {Storage::kDense, Storage::kCoo}) {
    for (std::uint64_t row_elems : {1, 16}) {
      CaseSpec spec = inexact(4, DType::kF32, row_elems, Pattern::kFront);
      spec.rows = 400009 / row_elems;
      spec.density = 0.05;
      spec.storage = storage;
      Case job = make_case(spec);
      const Sum expected = oracle(job);
      EngineOptions options = options_of(SchemeId::kBalanced);
      options.max_bytes = 64 * 1024;
      Group group(4, options);
      for (int round = 0; round < 3; ++round) {  // the second and third know a histogram
        Case fresh = job;
        Jobs jobs;
        ASSERT_TRUE(group.run(fresh, "tensor", jobs));
        EXPECT_GT(jobs[0]->report().chunk_ends.size(), round == 0 ? 1U : 8U) << label(spec);
        for (int rank = 0; rank < 4; ++rank) {
          ASSERT_TRUE(holds(fresh, rank, *jobs[static_cast<std::size_t>(rank)], expected))
              << label(spec) << " round " << round;
        }
      }
    }
  }
}

/// Controls: another order of adding gives other bits on these inputs, so the tests above can fail.
TEST(OrderControl, TheOrderOfAddingShows) {
  CaseSpec spec = inexact(8, DType::kF32, 1, Pattern::kFull);
  Case job = make_case(spec);
  Case turned = job;
  std::reverse(turned.ranks.begin(), turned.ranks.end());
  EXPECT_FALSE(same_bytes(oracle(job).dense, oracle(turned).dense, spec.dtype));
  EXPECT_FALSE(same_bytes(oracle(job).dense, tree_oracle(job), spec.dtype));
  CaseSpec half = inexact(8, DType::kBF16, 1, Pattern::kFull);
  job = make_case(half);
  std::vector<std::byte> rounded_each_time(half.rows * 2);
  for (std::size_t i = 0; i < half.rows; ++i) {
    double sum = 0;
    for (const RankData& data : job.ranks) {
      const double next = sum + value_of(load(data.dense, i, half.dtype), half.dtype);
      sum = value_of(bits_of(next, half.dtype), half.dtype);
    }
    store(rounded_each_time, i, half.dtype, bits_of(sum, half.dtype));
  }
  EXPECT_FALSE(same_bytes(oracle(job).dense, rounded_each_time, half.dtype));
}

}  // namespace
}  // namespace zensync::test
