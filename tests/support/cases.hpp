// A job of all ranks as data: inputs in every storage, the sum that must come out, and the
// comparison. Place: tests/support. A Case owns its memory and must outlive the jobs made from it.
// The oracle adds in rank order in the type of sums, so it is exact for one-shot schemes, and for
// all schemes on small integers.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "element.hpp"
#include "patterns.hpp"
#include "zensync/engine/engine.hpp"

namespace zensync::test {

enum class Storage { kDense, kDenseIds, kCoo, kCooDuplicates };
enum class Values { kSmallIntegers, kInexact };

inline bool is_coo(Storage storage) {
  return storage == Storage::kCoo || storage == Storage::kCooDuplicates;
}

struct CaseSpec {
  int size = 2;
  DType dtype = DType::kF32;
  Storage storage = Storage::kDense;
  std::uint64_t rows = 0;
  std::uint64_t row_elems = 1;
  Pattern pattern = Pattern::kUniform;
  Values values = Values::kSmallIntegers;
  ReduceOp op = ReduceOp::kSum;
  double density = 0.05;
  std::uint64_t seed = 1;
};

/// One rank: its rows (logical, ascending) with values, and the same as stored.
struct RankData {
  Rows rows;
  std::vector<std::byte> values;
  std::vector<std::byte> dense;
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> coo_rows;
  std::vector<std::byte> coo_values;
};

struct Case {
  CaseSpec spec;
  std::vector<RankData> ranks;
  std::uint64_t row_bytes() const { return spec.row_elems * dtype_bytes(spec.dtype); }
};

struct Sum {
  Rows rows;
  std::vector<std::byte> values;
  std::vector<std::byte> dense;  ///< the same, dense-stored (dense cases only)
};

inline std::string label(const CaseSpec& spec) {
  constexpr std::string_view kStorages[] = {"dense", "ids", "coo", "coo_dup"};
  return "n=" + std::to_string(spec.size) + " " + std::string(dtype_name(spec.dtype)) + " " +
         std::string(kStorages[static_cast<int>(spec.storage)]) + " " + std::to_string(spec.rows) +
         "x" + std::to_string(spec.row_elems) + " " + std::string(pattern_name(spec.pattern)) +
         " seed " + std::to_string(spec.seed);
}

inline std::uint64_t value_bits(const CaseSpec& spec, std::uint64_t hash) {
  if (spec.values == Values::kSmallIntegers) {
    return bits_of(static_cast<double>(hash % 9) - 4, spec.dtype);
  }
  if (!is_float(spec.dtype)) return spec.dtype == DType::kI32 ? hash & 0xFFFFFFFFU : hash;
  const double fraction = static_cast<double>(hash >> 12) * 0x1p-51 - 1;
  return bits_of(std::ldexp(fraction, static_cast<int>(hash % 13) - 6), spec.dtype);
}

/// Entries in shuffled order; each row is split into two that add up to it (small integers only).
inline void store_duplicates(const Case& job, RankData& data) {
  const CaseSpec& spec = job.spec;
  const std::size_t count = data.rows.size();
  std::vector<std::size_t> order(2 * count);
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return mix64(a ^ spec.seed) < mix64(b ^ spec.seed);
  });
  data.coo_rows.resize(order.size());
  data.coo_values.resize(order.size() * job.row_bytes());
  for (std::size_t at = 0; at < order.size(); ++at) {
    const std::size_t i = order[at] / 2;
    data.coo_rows[at] = static_cast<std::int64_t>(data.rows[i]);
    for (std::size_t j = 0; j < spec.row_elems; ++j) {
      const auto part = static_cast<double>(mix64(i * 1000 + j) % 5);
      const double whole =
          value_of(load(data.values, i * spec.row_elems + j, spec.dtype), spec.dtype);
      const double value = order[at] % 2 == 0 ? part : whole - part;
      store(data.coo_values, at * spec.row_elems + j, spec.dtype, bits_of(value, spec.dtype));
    }
  }
}

/// Makes the stored form of each rank's rows and values.
inline void store_case(Case& job) {
  for (RankData& data : job.ranks) {
    if (job.spec.storage == Storage::kCooDuplicates) {
      store_duplicates(job, data);
    } else if (job.spec.storage == Storage::kCoo) {
      data.coo_rows.assign(data.rows.begin(), data.rows.end());
      data.coo_values = data.values;
    } else {
      data.dense.assign(job.spec.rows * job.row_bytes(), std::byte{0});
      for (std::size_t i = 0; i < data.rows.size(); ++i) {
        std::copy_n(data.values.data() + i * job.row_bytes(), job.row_bytes(),
                    data.dense.data() + data.rows[i] * job.row_bytes());
      }
      data.ids.assign(data.rows.begin(), data.rows.end());
    }
  }
}

/// Rows by pattern, values by hash.
inline Case make_case(const CaseSpec& spec) {
  Case job{spec, std::vector<RankData>(static_cast<std::size_t>(spec.size))};
  for (int rank = 0; rank < spec.size; ++rank) {
    RankData& data = job.ranks[static_cast<std::size_t>(rank)];
    data.rows = rows_of_rank({spec.pattern, spec.rows, spec.size, spec.density, spec.seed}, rank);
    data.values.resize(data.rows.size() * job.row_bytes());
    for (std::size_t i = 0; i < data.rows.size() * spec.row_elems; ++i) {
      const std::uint64_t hash =
          mix64(mix64(spec.seed * 64 + static_cast<std::uint64_t>(rank)) ^ i);
      store(data.values, i, spec.dtype, value_bits(spec, hash));
    }
  }
  store_case(job);
  return job;
}

/// A case of which rows and values are written by hand: values[rank][i], rows[rank][i], bits of
/// elements.
inline Case manual_case(const CaseSpec& spec, const std::vector<Rows>& rows,
                        const std::vector<std::vector<std::uint64_t>>& bits) {
  Case job{spec, std::vector<RankData>(static_cast<std::size_t>(spec.size))};
  for (std::size_t rank = 0; rank < job.ranks.size(); ++rank) {
    RankData& data = job.ranks[rank];
    data.rows = rows[rank];
    data.values.resize(bits[rank].size() * dtype_bytes(spec.dtype));
    for (std::size_t i = 0; i < bits[rank].size(); ++i) {
      store(data.values, i, spec.dtype, bits[rank][i]);
    }
  }
  store_case(job);
  return job;
}

inline JobSpec job_of(Case& job, int rank, const std::string& name) {
  RankData& data = job.ranks[static_cast<std::size_t>(rank)];
  JobSpec result;
  result.name = name;
  result.op = job.spec.op;
  result.allow_dense = false;
  if (is_coo(job.spec.storage)) {
    result.input = CooView{data.coo_rows.data(), data.coo_values.data(), data.coo_rows.size(),
                           job.spec.rows,        job.spec.row_elems,     job.spec.dtype};
    return result;
  }
  DenseView view{data.dense.data(), job.spec.rows, job.spec.row_elems, job.spec.dtype, nullptr, 0};
  if (job.spec.storage == Storage::kDenseIds) {
    static const std::int64_t kNoIds = 0;
    view.ids = data.ids.empty() ? &kNoIds : data.ids.data();
    view.ids_count = data.ids.size();
  }
  result.input = view;
  return result;
}

/// The sum of all ranks, in rank order. Computed from the logical rows, so before or after the job
/// ran.
inline Sum oracle(const Case& job) {
  const CaseSpec& spec = job.spec;
  std::map<std::uint64_t, std::vector<std::pair<std::size_t, std::size_t>>> holders;
  for (std::size_t rank = 0; rank < job.ranks.size(); ++rank) {
    for (std::size_t i = 0; i < job.ranks[rank].rows.size(); ++i) {
      holders[job.ranks[rank].rows[i]].push_back({rank, i});
    }
  }
  Sum sum;
  sum.values.resize(holders.size() * job.row_bytes());
  std::vector<std::uint64_t> terms;
  for (const auto& [row, list] : holders) {
    for (std::size_t j = 0; j < spec.row_elems; ++j) {
      terms.clear();
      for (const auto& [rank, i] : list) {
        terms.push_back(load(job.ranks[rank].values, i * spec.row_elems + j, spec.dtype));
      }
      const double divisor = spec.op == ReduceOp::kAvg ? spec.size : 1;
      store(sum.values, sum.rows.size() * spec.row_elems + j, spec.dtype,
            ordered_sum(terms, spec.dtype, divisor));
    }
    sum.rows.push_back(row);
  }
  if (is_coo(spec.storage)) return sum;
  sum.dense.assign(spec.rows * job.row_bytes(), std::byte{0});
  for (std::size_t i = 0; i < sum.rows.size(); ++i) {
    std::copy_n(sum.values.data() + i * job.row_bytes(), job.row_bytes(),
                sum.dense.data() + sum.rows[i] * job.row_bytes());
  }
  return sum;
}

inline ::testing::AssertionResult same_bytes(std::span<const std::byte> expected,
                                             std::span<const std::byte> actual, DType dtype) {
  if (expected.size() != actual.size()) {
    return ::testing::AssertionFailure()
           << expected.size() << " bytes expected, " << actual.size() << " found";
  }
  if (expected.empty() || std::memcmp(expected.data(), actual.data(), expected.size()) == 0) {
    return ::testing::AssertionSuccess();
  }
  std::size_t i = 0;
  while (load(expected, i, dtype) == load(actual, i, dtype)) ++i;
  return ::testing::AssertionFailure()
         << "element " << i << " is " << value_of(load(actual, i, dtype), dtype) << " (bits "
         << std::hex << load(actual, i, dtype) << "), not "
         << value_of(load(expected, i, dtype), dtype) << " (" << load(expected, i, dtype) << ")";
}

/// Whether rank `rank` of `job`, whose job `done` has ended, holds `expected` bit for bit.
inline ::testing::AssertionResult holds(const Case& job, int rank, const Job& done,
                                        const Sum& expected) {
  if (!done.status().ok()) {
    return ::testing::AssertionFailure()
           << "rank " << rank << ": " << done.status().error().message;
  }
  if (!is_coo(job.spec.storage)) {
    return same_bytes(expected.dense, job.ranks[static_cast<std::size_t>(rank)].dense,
                      job.spec.dtype);
  }
  const auto rows = done.result_rows();
  if (!std::equal(
          rows.begin(), rows.end(), expected.rows.begin(), expected.rows.end(),
          [](std::int64_t a, std::uint64_t b) { return a == static_cast<std::int64_t>(b); })) {
    return ::testing::AssertionFailure() << "rank " << rank << ": " << rows.size() << " rows for "
                                         << expected.rows.size() << ", or other ones";
  }
  return same_bytes(expected.values, done.result_values(), job.spec.dtype);
}

}  // namespace zensync::test
