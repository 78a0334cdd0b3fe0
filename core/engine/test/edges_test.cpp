// Values and shapes at the edge: −0.0, cancelled units, NaN, infinities, denormals under DAZ and
// FTZ, ids known beforehand, non-zeros that a scan would miss, a table of 2^33 rows. Place: tests
// of the engine. Inputs are written by hand as bits; expectations follow docs/numerics.md and the
// glossary.
#include <gtest/gtest.h>

#include <fstream>

#include "group.hpp"
#include "zensync/base/fp_env.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zensync::test {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kF64, DType::kBF16, DType::kF16};

/// DAZ and FTZ for this thread and the threads that it starts meanwhile.
class ScopedFlush {
 public:
#if defined(__x86_64__)
  ScopedFlush() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040U); }
  ~ScopedFlush() { _mm_setcsr(saved_); }
  ScopedFlush(const ScopedFlush&) = delete;
  ScopedFlush& operator=(const ScopedFlush&) = delete;

 private:
  unsigned saved_;
#endif
};

/// Runs `check` for every scheme and codec policy (dense_ring has no index: once).
template <class Check>
void for_each_wire(Check check) {
  for (SchemeId scheme : kSchemes) {
    for (IndexCodec policy : kPolicies) {
      EngineOptions options = options_of(scheme);
      options.wire.codec = policy;
      check(options);
      if (scheme == SchemeId::kDenseRing) break;
    }
  }
}

std::vector<std::vector<std::uint64_t>> no_values(int size) {
  return std::vector<std::vector<std::uint64_t>>(static_cast<std::size_t>(size));
}

TEST(Edges, MinusZeroOfOneRankBecomesPlusZeroEverywhere) {
  for (DType dtype : kFloats) {
    for (int size : {1, 2, 3, 8}) {
      CaseSpec spec{size, dtype, Storage::kDense, 40, 3, Pattern::kUniform};
      std::vector<Rows> rows(static_cast<std::size_t>(size));
      auto bits = no_values(size);
      rows[static_cast<std::size_t>(size / 2)] = {0, 7, 39};
      bits[static_cast<std::size_t>(size / 2)] = {sign_bit(dtype),
                                                  sign_bit(dtype),
                                                  sign_bit(dtype),
                                                  sign_bit(dtype),
                                                  bits_of(3, dtype),
                                                  sign_bit(dtype),
                                                  0,
                                                  0,
                                                  sign_bit(dtype)};
      const Case job = manual_case(spec, rows, bits);
      const Sum expected = oracle(job);
      ASSERT_EQ(load(expected.dense, 0, dtype), 0U);
      for (SchemeId scheme : kSchemes) expect_sum(job, options_of(scheme), expected);
    }
  }
}

/// The same for rows that are listed: −0.0 inside the list is summed away.
TEST(Edges, MinusZeroInListedRowsBecomesPlusZero) {
  for (Storage storage : {Storage::kDenseIds, Storage::kCoo}) {
    CaseSpec spec{3, DType::kF32, storage, 40, 2, Pattern::kUniform};
    const std::uint64_t minus = sign_bit(DType::kF32);
    const Case job =
        manual_case(spec, {{4}, {4, 9}, {}}, {{minus, minus}, {minus, 0, minus, 5}, {}});
    const Sum expected = oracle(job);
    ASSERT_EQ(load(expected.values, 0, DType::kF32), 0U);
    for (SchemeId scheme : kSparseSchemes) expect_sum(job, options_of(scheme), expected);
  }
}

TEST(Edges, CancelledUnitsBecomePlusZeroAndStayInTheUnion) {
  for (DType dtype : kAllDTypes) {
    for (int size : {2, 3, 5, 8}) {
      for (Storage storage : {Storage::kDense, Storage::kDenseIds, Storage::kCoo}) {
        CaseSpec spec{size, dtype, storage, 90, 1, Pattern::kUniform};
        std::vector<Rows> rows(static_cast<std::size_t>(size));
        auto bits = no_values(size);
        rows.front() = rows.back() = {0, 11, 50, 89};
        for (double value : {1, -2, 3, 100}) {
          bits.front().push_back(bits_of(value, dtype));
          bits.back().push_back(bits_of(-value, dtype));
        }
        const Case job = manual_case(spec, rows, bits);
        const Sum expected = oracle(job);
        ASSERT_EQ(load(expected.values, 2, dtype), 0U);
        for_each_wire([&](const EngineOptions& options) {
          if (is_coo(storage) && options.scheme == SchemeId::kDenseRing) return;
          expect_sum(job, options, expected);
        });
      }
    }
  }
}

TEST(Edges, CancelledUnitsAreCountedInTheUnion) {
  CaseSpec spec{4, DType::kF32, Storage::kDense, 90, 1, Pattern::kUniform};
  const std::uint64_t plus = bits_of(2.5, DType::kF32);
  const std::uint64_t minus = bits_of(-2.5, DType::kF32);
  for_each_wire([&](const EngineOptions& options) {
    if (options.scheme == SchemeId::kDenseRing) return;
    Case job = manual_case(spec, {{3, 8}, {}, {3}, {}}, {{plus, plus}, {}, {minus}, {}});
    Group group(4, options);
    Jobs jobs;
    ASSERT_TRUE(group.run(job, "t", jobs));
    for (const auto& done : jobs) EXPECT_EQ(done->report().union_units, 2U);
  });
}

/// NaN and infinities arrive as such, with equal bits on all ranks; Inf − Inf is NaN.
TEST(Edges, NanAndInfinity) {
  const double inf = std::numeric_limits<double>::infinity();
  for (DType dtype : kFloats) {
    for (int size : {2, 3, 7}) {
      CaseSpec spec{size, dtype, Storage::kDense, 64, 1, Pattern::kUniform};
      std::vector<Rows> rows(static_cast<std::size_t>(size));
      auto bits = no_values(size);
      rows[0] = {1, 2, 3, 4, 5};
      for (double value : {std::nan(""), inf, -inf, inf, 7.0})
        bits[0].push_back(bits_of(value, dtype));
      rows[1] = {1, 4, 5, 6};
      for (double value : {1.0, -inf, std::nan(""), -inf}) bits[1].push_back(bits_of(value, dtype));
      const Case job = manual_case(spec, rows, bits);
      for_each_wire([&](const EngineOptions& options) {
        Case copy = job;
        Group group(size, options);
        Jobs jobs;
        ASSERT_TRUE(group.run(copy, "t", jobs));
        const double expected[] = {0, std::nan(""), inf, -inf, std::nan(""), std::nan(""), -inf, 0};
        for (std::size_t i = 0; i < 8; ++i) {
          const double value = value_of(load(copy.ranks[0].dense, i, dtype), dtype);
          EXPECT_TRUE(std::isnan(expected[i]) ? std::isnan(value) : value == expected[i])
              << i << " is " << value << " " << scheme_name(options.scheme) << label(spec);
        }
        for (const RankData& data : copy.ranks) {
          EXPECT_TRUE(same_bytes(copy.ranks[0].dense, data.dense, dtype)) << label(spec);
        }
      });
    }
  }
}

/// NaNs with payloads on every rank, signalling ones too: all ranks end with the same bits, as NaN.
TEST(Edges, NanPayloadsAreEqualOnAllRanks) {
  const std::uint64_t infinities[] = {0x7F800000, 0x7FF0000000000000, 0x7F80, 0x7C00};
  for (std::size_t t = 0; t < 4; ++t) {
    const DType dtype = kFloats[t];
    const int size = 5;
    CaseSpec spec{size, dtype, Storage::kDense, 50, 1, Pattern::kFull};
    Case job = make_case(spec);
    for (std::size_t rank = 0; rank < 5; ++rank) {
      for (std::size_t i = 0; i < 50; ++i) {
        const std::uint64_t payload = 1 + mix64(rank * 50 + i) % 100;
        if (i % 5 != rank && i < 25) continue;
        store(job.ranks[rank].dense, i, dtype, infinities[t] | payload);
      }
    }
    for (SchemeId scheme : kSchemes) {
      Case copy = job;
      Group group(size, options_of(scheme));
      Jobs jobs;
      ASSERT_TRUE(group.run(copy, "t", jobs));
      for (const RankData& data : copy.ranks) {
        ASSERT_TRUE(same_bytes(copy.ranks[0].dense, data.dense, dtype)) << scheme_name(scheme);
        for (std::size_t i = 0; i < 50; ++i) {
          ASSERT_TRUE(std::isnan(value_of(load(data.dense, i, dtype), dtype))) << i;
        }
      }
    }
  }
}

/// Denormals, and normals whose sum is denormal, while the thread that makes engines and submits
/// flushes.
TEST(Edges, DenormalsUnderDazAndFtz) {
  for (DType dtype : kFloats) {
    for (int size : {1, 2, 3, 5, 9}) {
      for (Storage storage : {Storage::kDense, Storage::kDenseIds, Storage::kCoo}) {
        CaseSpec spec{size, dtype, storage, 200, 2, Pattern::kUniform};
        spec.density = 0.4;
        Case job = make_case(spec);
        for (RankData& data : job.ranks) {
          for (std::size_t i = 0; i < data.rows.size() * 2; ++i) {
            const std::uint64_t bits = load(data.values, i, dtype);
            store(data.values, i, dtype, (bits & sign_bit(dtype)) | (1 + mix64(i + bits) % 3));
          }
        }
        store_case(job);
        const Sum expected = oracle(job);
        for (SchemeId scheme : kSchemes) {
          if (scheme == SchemeId::kDenseRing && is_coo(storage)) continue;
          const ScopedFlush flush;
          expect_sum(job, options_of(scheme), expected);
        }
      }
    }
  }
}

TEST(EdgesControl, FlushingThreadsWouldLoseDenormals) {
#if defined(__x86_64__)
  const ScopedFlush flush;
  volatile float tiny = 1e-40F;
  EXPECT_EQ(tiny + tiny, 0.0F);
  const ScopedExactFloats exact;
  EXPECT_NE(tiny + tiny, 0.0F);
#endif
}

/// `ids` says where to look: rows outside are not read (a NaN there stays, unsent), also with an
/// empty list.
TEST(Edges, RowsOutsideIdsAreNotLookedAt) {
  for (SchemeId scheme : kSparseSchemes) {
    CaseSpec spec{3, DType::kF32, Storage::kDenseIds, 60, 4, Pattern::kUniform};
    Case job = make_case(spec);
    job.ranks[1].ids.clear();
    Case expected_job = job;
    expected_job.ranks[1].rows.clear();
    Sum expected = oracle(expected_job);
    Group group(3, options_of(scheme));
    Jobs jobs;
    ASSERT_TRUE(group.run(job, "t", jobs));
    EXPECT_TRUE(holds(job, 0, *jobs[0], expected));
    EXPECT_TRUE(holds(job, 2, *jobs[2], expected));
  }
}

/// Resident memory of this process at its highest, in bytes; 0 where unknown.
std::uint64_t peak_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::uint64_t kib = 0;
    if (word == "VmHWM:" && status >> kib) return kib * 1024;
  }
  return 0;
}

/// 2^33 rows, a hundred entries a rank: the first, the last, some that all ranks hold, some that
/// one holds.
Case huge_table(std::uint64_t row_elems) {
  CaseSpec spec{4, DType::kF32, Storage::kCoo, 1ULL << 33, row_elems, Pattern::kUniform};
  std::vector<Rows> rows(4);
  auto bits = no_values(4);
  for (std::uint64_t rank = 0; rank < 4; ++rank) {
    for (std::uint64_t i = 0; i < 100; ++i) {
      rows[rank].push_back(i * 85899345 + (i % 3 == 0 ? 0 : rank + 1));
    }
    rows[rank].back() = spec.rows - 1;
    bits[rank].assign(100 * row_elems, bits_of(1.5, spec.dtype));
  }
  return manual_case(spec, rows, bits);
}

TEST(Edges, ATableOf2To33RowsCostsMemoryByItsEntries) {
  for (std::uint64_t row_elems : {1, 16}) {
    const Case job = huge_table(row_elems);
    const Sum expected = oracle(job);
    const std::uint64_t before = peak_bytes();
    for_each_wire([&](EngineOptions options) {
      if (options.scheme == SchemeId::kDenseRing) return;
      for (PartitionKind partition : {PartitionKind::kRotation, PartitionKind::kRange}) {
        options.wire.partition = partition;
        const auto start = Clock::now();
        expect_sum(job, options, expected);
        const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
        EXPECT_LT(seconds, 2) << scheme_name(options.scheme);
      }
    });
    EXPECT_LT(peak_bytes() - before, 256U << 20) << "a bit for each row would be 1 GiB";
  }
}

TEST(Edges, DenseRingRefusesCoo) {
  Case job = make_case({3, DType::kF32, Storage::kCoo, 100, 1, Pattern::kUniform});
  Group group(3, options_of(SchemeId::kDenseRing));
  Jobs jobs;
  ASSERT_TRUE(group.run(job, "t", jobs));
  for (const auto& done : jobs) {
    ASSERT_FALSE(done->status().ok());
    EXPECT_EQ(done->status().error().kind, ErrorKind::kUnsupported);
  }
}

}  // namespace
}  // namespace zensync::test
