// The engine: a queue of jobs, one thread that runs them in submission order over one driver,
// workspaces, deadlines, and what is known of each tensor.
// Place: engine, level 5: the only mutable data of the core.
// Owner: it owns its driver, thread and workspaces. Memory named by a JobSpec is the caller's and
// must live, untouched, until the job has ended; a Job owns its report and COO result.
// Threads: every public call may come from any thread; jobs run on the engine's own, with DAZ and
// FTZ cleared. Never calls back.
// Failures: a job ends with an error or well, and at its deadline at the latest. The first error is
// final: peers are told, and every later job ends with it at once. With control connections all
// ranks end with the same error, and an idle engine learns what its peers report. Out of memory is
// kCapacity.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "zensync/base/result.hpp"
#include "zensync/base/view.hpp"
#include "zensync/driver/control.hpp"
#include "zensync/driver/driver.hpp"
#include "zensync/plan/plan.hpp"
#include "zensync/scheme/context.hpp"
#include "zensync/scheme/reduce_scatter.hpp"

namespace zensync {

struct EngineOptions {
  SchemeId scheme = SchemeId::kAuto;
  /// A target for the workspace of a `balanced` job, reached by more chunks, from counts of earlier
  /// jobs; not a hard bound, and without effect on the other schemes. 0: none.
  std::uint64_t max_bytes = 0;
  std::chrono::milliseconds deadline{1800000};  ///< for one job, from its start
  std::uint64_t parts = 0;  ///< units per row (comparisons); 0: as the counts advise
  WireOptions wire;         ///< codec and partition (tests, comparisons), digests on messages
  /// Whether chunks overlap computing and sending. Not where an exchange takes longer than that
  /// saves (torch): there are then only as many chunks as `max_bytes` asks for. Equal on all ranks.
  bool overlap = true;
};

/// Where this rank's part of a sum goes, instead of the whole sum into the input
/// (reduce_scatter.hpp).
struct ShardView {
  ShardLayout layout = ShardLayout::kRows;
  void* data = nullptr;  ///< shard_elems() elements; shares no memory with the input
};

/// One tensor to synchronise. DenseView: summed in place. CooView: the result is fetched from the
/// Job.
struct JobSpec {
  std::string name;  ///< the tensor's name: its key, and what errors call it; equal on all ranks
  std::variant<DenseView, CooView> input;
  ReduceOp op = ReduceOp::kSum;
  /// Whether the engine may answer Outcome::kUseDense. The caller then runs a dense all-reduce of
  /// its own (the Python package: over a Gloo backend of the State's, docs/adr/0006).
  bool allow_dense = true;
  /// Where a tensor without counts starts.
  bool starts_dense = false;
  /// Set: a reduce-scatter of a DenseView. It always goes through the sparse push, whatever the
  /// scheme of the engine, as that costs at most an index beside the values.
  std::optional<ShardView> shard = std::nullopt;
};

enum class Outcome {
  kDone,      ///< the sum is in place (dense) or can be fetched (COO)
  kUseDense,  ///< all ranks agreed on a dense all-reduce by the caller; nothing was changed or
              ///< sent but headers
};

/// How one job went.
struct JobReport {
  JobCall call = JobCall::kAllReduce;
  SchemeId scheme = SchemeId::kBalanced;
  std::uint64_t width = 0;
  std::uint64_t units = 0;        ///< this rank's non-zero units
  std::uint64_t union_units = 0;  ///< of all ranks
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
  std::vector<std::uint64_t> chunk_ends;  ///< of the plan, in slots
  double seconds = 0;                     ///< from start to end on the engine's thread
  ShardCounts shard;                      ///< of a reduce-scatter; `union_units` is its shard's
};

class Job {
 public:
  virtual ~Job() = default;
  /// Waits until the job has ended or `until`; true if it has.
  virtual bool wait_until(Clock::time_point until) = 0;
  virtual bool done() const = 0;
  // What follows is for a job that has ended.
  virtual const Status& status() const = 0;
  virtual Outcome outcome() const = 0;
  virtual const JobReport& report() const = 0;
  /// COO results: rows, ascending (int64), and values (rows × row_elems, in the tensor's dtype).
  /// Kept until the Job is destroyed.
  virtual std::span<const std::int64_t> result_rows() const = 0;
  virtual std::span<const std::byte> result_values() const = 0;
};

/// A tensor that is about to go through the caller's dense all-reduce: all ranks check that they
/// agree. When a probe is due (every 64th time) and `data` is not null, a sample of it is counted
/// and shared.
struct DenseItem {
  std::string name;
  TensorSpec spec;
  const void* data = nullptr;
  ReduceOp op = ReduceOp::kSum;
  bool probe = false;  ///< whether this tensor may become sparse again (its density is probed)
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual std::shared_ptr<Job> submit(JobSpec spec) = 0;
  /// One small round in which all ranks agree on what they will reduce densely; a Job like any
  /// other.
  virtual std::shared_ptr<Job> agree(std::vector<DenseItem> items) = 0;
  /// Whether the next job of `name` would be dense; a function of what travelled with ended jobs,
  /// so equal on all ranks when they ask after the same jobs have ended.
  virtual bool would_be_dense(const std::string& name, const TensorSpec& spec,
                              bool starts_dense) = 0;
  /// The first error of any job; ok while there was none. After an error every job fails with it.
  virtual Status status() const = 0;
  /// As `status`, but what all ranks call it: until they have agreed, `status` may be one rank's
  /// word for it. Waits for that at most two seconds after the error was known here.
  virtual Status settled() noexcept = 0;
  virtual WireCount wire_count() const = 0;
  /// Ends the thread: waits for running jobs at most `timeout`, then aborts them. Idempotent.
  virtual void close(std::chrono::milliseconds timeout) = 0;
  /// Gives up at once: every job fails with `why`, all peers are told.
  virtual void abort(const Error& why) = 0;
  /// The caller waits for its peers in a dense all-reduce of its own, until `end_dense`.
  virtual void begin_dense(const std::string& name) = 0;
  virtual void end_dense() = 0;
  /// Lines for people since the last call: who is waited for. Any thread; empty without control.
  virtual std::vector<std::string> take_notices() = 0;
  /// In a forked child only: lets go of the parent's connections.
  virtual void close_handles_in_child() noexcept = 0;
};

/// control: may be null (one rank, tests); started by the engine.
std::unique_ptr<Engine> make_engine(std::unique_ptr<Driver> driver, EngineOptions options,
                                    std::unique_ptr<Control> control = nullptr);

}  // namespace zensync
