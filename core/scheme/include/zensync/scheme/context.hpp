// What a scheme works with: who it is, what the job is, where units come from and go to, and memory
// to work in; and the schemes themselves.
// Place: scheme, level 3. The engine makes a context for each job.
// Owner: all pointers are the caller's and outlive the coroutine. A Workspace belongs to one engine
// and only grows: while counts do not grow, what a job still allocates is small (the coroutine's
// frame, vectors with an entry per rank or histogram bin, the Job itself).
// Threads: one job at a time, on one thread.
// A scheme ends with kCorruptMessage or kMismatch, naming peer and tensor; std::bad_alloc passes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zensync/base/plan.hpp"
#include "zensync/base/topology.hpp"
#include "zensync/codec/message.hpp"
#include "zensync/partition/partition.hpp"
#include "zensync/scheme/exchange.hpp"
#include "zensync/scheme/scheme_task.hpp"
#include "zensync/scheme/set_adder.hpp"
#include "zensync/scheme/sink.hpp"
#include "zensync/scheme/source.hpp"

namespace zensync {

struct Workspace {
  explicit Workspace(int size);
  Splitter split_owners;  ///< over n owners
  Splitter split_whole;   ///< over one
  Array<std::uint32_t> rel;
  std::vector<MessageWriter> push[2];  ///< per owner; two generations: one may still be under way
  MessageWriter pull[2];
  std::vector<Buffer> received_push;  ///< per peer
  std::vector<Buffer> received_pull;
  std::vector<SparseSet> sets;  ///< per peer, decoded
  SparseSet sums;
  SparseSet other;
  SparseSet spare;
  SetAdder adder;
  Buffer final_values;
  Buffer ring;
  Exchange exchange;
};

/// How a scheme sends, beyond the plan: for tests and comparisons; equal on all ranks.
struct WireOptions {
  IndexCodec codec = IndexCodec::kBlocks;
  PartitionKind partition = PartitionKind::kRotation;
  bool verify = true;
};

struct SchemeContext {
  const kernels::Table* kernels = nullptr;
  Rank rank;
  const Topology* topology = nullptr;  ///< (host, local rank) of every rank
  JobHeader job;
  std::string tensor;  ///< name for errors
  TensorSpec spec;
  Plan plan;
  WireOptions wire;
  UnitSource* source = nullptr;
  UnitSink* sink = nullptr;
  void* dense_data = nullptr;  ///< dense_ring only
  Workspace* workspace = nullptr;
  KnownCounts* counts = nullptr;  ///< filled by the scheme; equal on all ranks afterwards

  int size() const { return topology->size(); }
  std::uint64_t units() const { return spec.elems() / plan.width; }
  std::size_t unit_bytes() const { return plan.width * dtype_bytes(spec.dtype); }
  /// Units of a sum while it is on its way: fp32 for 16-bit floats.
  std::size_t sum_bytes() const { return plan.width * dtype_bytes(sum_dtype(spec.dtype)); }
  double divisor() const { return job.op == ReduceOp::kAvg ? size() : 1.0; }
};

/// Push to owners, add in rank order, pull: two messages per pair of ranks and chunk.
SchemeTask balanced(SchemeContext& context);
/// Halves of ever larger blocks of ranks exchange their sums; ranks beyond a power of two are
/// folded first.
SchemeTask recursive_doubling(SchemeContext& context);
/// Everybody sends all its units to everybody and adds them all, in rank order.
SchemeTask agsparse(SchemeContext& context);
/// A ring over all elements: reduce-scatter, then all-gather. Dense-stored tensors only.
SchemeTask dense_ring(SchemeContext& context);
/// The scheme of the context's plan, one of the four above; `balanced` where it names none of them.
SchemeTask start_scheme(SchemeContext& context);
/// One round of headers, before a dense all-reduce outside the core. `mine` and `theirs` are in
/// order of items; theirs is [peer][item] and filled on success.
SchemeTask agree(SchemeContext& context, const std::vector<JobHeader>& mine,
                 const std::vector<std::string>& names,
                 std::vector<std::vector<JobHeader>>& theirs);

}  // namespace zensync
