// Rows of a table whose shards are on all ranks, for each rank those that it asks for.
// Place: scheme, level 3; the way back of a sharded optimiser (reduce_scatter.hpp is the way
// there). A rank reads the rows that its next batch needs, not the whole table.
// Shapes: a table of rows × row_elems, in shards as reduce_scatter leaves them; each rank gives any
// ids, unsorted and repeated, and gets one row for each.
// Owner: shard, ids and output are the caller's, do not overlap and outlive the coroutine.
// Threads: as for every scheme (context.hpp). Fails with kInvalid before anything is sent (ids that
// are not in the table), with kCorruptMessage or kMismatch afterwards; std::bad_alloc passes.
#pragma once

#include <cstdint>
#include <span>

#include "zensync/scheme/context.hpp"
#include "zensync/scheme/reduce_scatter.hpp"

namespace zensync {

struct RowRequest {
  ShardLayout layout = ShardLayout::kRows;
  const void* shard = nullptr;  ///< shard_elems() elements: what this rank has of the table
  std::span<const std::int64_t> ids;
  void* output = nullptr;         ///< ids × row_elems elements, all of them written
  ShardCounts* counts = nullptr;  ///< units are rows or their parts: sent ids, received ids
};

/// Two exchanges: distinct ids to their owners (rows) or to all ranks (columns), rows back, as they
/// are, without adding. `context.spec` is the whole table, `context.plan.width` shard_width(…);
/// `context.source`, `sink` and `counts` are not used.
SchemeTask gather_rows(SchemeContext& context, RowRequest request);

/// kInvalid, naming the first id outside [0, rows).
Status check_ids(std::span<const std::int64_t> ids, std::uint64_t rows);

}  // namespace zensync
