// A table whose shards are on all ranks, and the rows of it that each rank asks for. Place:
// tests/support. Bytes of rows are any; they are moved, not added.
// A Table owns its memory and must outlive the jobs made from it.
#pragma once

#include <algorithm>
#include <vector>

#include "shards.hpp"

namespace zensync::test {

inline std::uint64_t below(std::uint64_t seed, std::uint64_t stream, std::uint64_t n) {
  return mix64(mix64(seed) + stream) % n;
}

/// A table, its shards, and what each rank asks for.
struct Table {
  CaseSpec spec;  ///< shape and ranks
  ShardLayout layout = ShardLayout::kRows;
  Memory whole;
  std::vector<Memory> shards;
  std::vector<std::vector<std::int64_t>> ids;
  std::vector<Memory> outputs;

  std::size_t row_bytes() const { return spec.row_elems * dtype_bytes(spec.dtype); }
  JobSpec job(int rank) {
    const auto index = static_cast<std::size_t>(rank);
    JobSpec job;
    job.name = "table";
    const std::uint64_t parts = layout == ShardLayout::kRows ? 1 : static_cast<unsigned>(spec.size);
    const std::uint64_t elems = spec.row_elems / parts;
    job.input = DenseView{shards[index].data(),
                          shards[index].size() / dtype_bytes(spec.dtype) / elems,
                          elems,
                          spec.dtype,
                          nullptr,
                          0};
    job.rows = RowsView{layout,
                        spec.rows,
                        spec.row_elems,
                        ids[index].data(),
                        ids[index].size(),
                        outputs[index].data()};
    return job;
  }
  Memory expected(int rank) const {
    Memory rows;
    for (const std::int64_t id : ids[static_cast<std::size_t>(rank)]) {
      const auto begin = whole.begin() + id * static_cast<std::int64_t>(row_bytes());
      rows.insert(rows.end(), begin, begin + static_cast<std::int64_t>(row_bytes()));
    }
    return rows;
  }
};

inline Table make_table(const CaseSpec& spec, ShardLayout layout) {
  Table table{spec, layout, {}, {}, {}, {}};
  table.whole.resize(spec.rows * table.row_bytes());
  for (std::size_t i = 0; i < table.whole.size(); ++i) {
    table.whole[i] = static_cast<std::byte>(mix64(spec.seed + i));
  }
  for (int rank = 0; rank < spec.size; ++rank) {
    table.shards.push_back(shard_of(spec, table.whole, rank, layout));
    const auto stream = static_cast<std::uint64_t>(100 * rank);
    auto& ids = table.ids.emplace_back();
    const std::uint64_t count = spec.rows == 0 ? 0 : below(spec.seed, stream, 60);
    const std::uint64_t limit =
        below(spec.seed, stream + 1, 2) == 0 ? spec.rows : spec.rows / 3 + 1;
    for (std::uint64_t i = 0; i < count; ++i) {
      ids.push_back(static_cast<std::int64_t>(
          below(spec.seed, stream + 2 + i, std::min<std::uint64_t>(limit, spec.rows))));
    }
    table.outputs.emplace_back(count * table.row_bytes(), std::byte{0xAB});
  }
  return table;
}

}  // namespace zensync::test
