// Running jobs one after another; see runner.hpp. Place: engine, level 5.
// Every error gets rank and tensor here, if the place that found it did not know them.
#include "runner.hpp"

#include <limits>
#include <new>

#include "minority.hpp"
#include "probe.hpp"
#include "zensync/base/fp_env.hpp"
#include "zensync/base/hash.hpp"

namespace zensync {
namespace {

bool same_spec(const TensorSpec& a, const TensorSpec& b) {
  return a.rows == b.rows && a.row_elems == b.row_elems && a.dtype == b.dtype &&
         a.layout == b.layout;
}

/// Schemes without chunks put all units of a rank in one message, which counts them in 32 bits.
Status check_countable(const TensorSpec& spec, const Plan& plan) {
  const bool chunked = plan.scheme == SchemeId::kBalanced || plan.scheme == SchemeId::kDense;
  if (chunked || spec.layout == Layout::kCoo || spec.elems() / plan.width <= 0xFFFFFFFFULL) {
    return {};
  }
  return make_error(ErrorKind::kCapacity, "scheme '" + std::string(scheme_name(plan.scheme)) +
                                              "' takes at most 2^32 units; use 'balanced'");
}

/// Ends what `begin_job` began, also where the job throws: nobody waits in it any more.
class WatchedJob {
 public:
  WatchedJob(Control* control, const std::string& name) : control_(control) {
    if (control_ != nullptr) control_->begin_job(name);
  }
  ~WatchedJob() {
    try {
      if (control_ != nullptr) control_->end_job();
    } catch (const std::bad_alloc&) {  // no memory to tell people that the wait is over
      return;
    }
  }
  WatchedJob(const WatchedJob&) = delete;
  WatchedJob& operator=(const WatchedJob&) = delete;

 private:
  Control* control_;
};

const std::string& name_of(const JobState& job) {
  return job.is_agreement && !job.items.empty() ? job.items.front().name : job.spec.name;
}

}  // namespace

Runner::Runner(Driver& driver, const EngineOptions& options, Control* control)
    : driver_(driver),
      control_(control),
      options_(options),
      table_(kernels::active()),
      workspace_(driver.size()),
      preparer_(table_) {
  plan_options_.scheme = options.scheme;
  plan_options_.max_bytes = options.max_bytes;
  plan_options_.parts = options.parts;
  plan_options_.overlap = options.overlap;
}

Status Runner::run(JobState& job) {
  const ScopedExactFloats exact;
  const auto start = Clock::now();
  const WireCount before = driver_.wire_count();
  deadline_ = start + options_.deadline;
  Status status;
  {
    const WatchedJob watched(control_, name_of(job));
    status = job.is_agreement             ? run_agreement(job)
             : job.spec.shard.has_value() ? run_shard(job)
                                          : run_tensor(job);
    if (status.ok()) status = late(driver_.flush(deadline_));
  }
  const WireCount after = driver_.wire_count();
  JobReport& report = job.result.report;
  report.sent_bytes = after.sent_bytes - before.sent_bytes;
  report.received_bytes = after.received_bytes - before.received_bytes;
  report.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  ++sequence_;
  return status;
}

TensorState& Runner::known(const std::string& name, const TensorSpec& spec, bool starts_dense) {
  auto [it, fresh] = known_.try_emplace(name);
  Known& entry = it->second;
  if (fresh || !same_spec(entry.spec, spec)) {
    entry.spec = spec;
    entry.state = TensorState();
    entry.state.dense = starts_dense;
  }
  return entry.state;
}

bool Runner::would_be_dense(const std::string& name, const TensorSpec& spec, bool starts_dense) {
  if (options_.scheme != SchemeId::kAuto) return options_.scheme == SchemeId::kDense;
  std::lock_guard lock(known_mutex_);
  const auto found = known_.find(name);
  const bool fresh = found == known_.end() || !same_spec(found->second.spec, spec);
  return fresh ? starts_dense : found->second.state.dense;
}

JobHeader Runner::header_of(const std::string& name, const TensorSpec& spec, ReduceOp op) const {
  JobHeader header;
  header.key = key_of(name);
  header.rows = spec.rows;
  header.row_elems = spec.row_elems;
  header.sequence = sequence_;
  header.size = static_cast<std::uint16_t>(driver_.size());
  header.dtype = spec.dtype;
  header.layout = spec.layout;
  header.op = op;
  return header;
}

SchemeContext Runner::context_of(const std::string& name, const TensorSpec& spec, ReduceOp op) {
  SchemeContext context;
  context.kernels = &table_;
  context.rank = driver_.rank();
  context.topology = &driver_.topology();
  context.job = header_of(name, spec, op);
  context.tensor = name;
  context.spec = spec;
  context.wire = options_.wire;
  context.workspace = &workspace_;
  return context;
}

Status Runner::drive(SchemeTask& task, std::span<const JobHeader> own) {
  const Exchange* last = nullptr;
  while (const Exchange* exchange = task.next()) {
    if (control_ != nullptr) control_->begin_exchange(exchange->phase);
    Status status = driver_.exchange(*exchange, deadline_);
    if (!status.ok()) return late(std::move(status));
    last = exchange;
  }
  Status status = task.status();
  if (status.ok() || last == nullptr || status.error().kind != ErrorKind::kMismatch) return status;
  return blame_minority(status.error(), *last, {driver_.rank(), own}, options_.wire.verify);
}

/// The driver names whom it waits for; that rank may itself wait for the one that is behind.
Status Runner::late(Status status) const {
  if (status.ok() || status.error().kind != ErrorKind::kDeadline || control_ == nullptr) {
    return status;
  }
  const Rank behind = control_->behind();
  if (behind.value < 0) return status;
  status.error().culprit = behind;
  status.error().message += "; rank " + std::to_string(behind.value) + " is furthest behind";
  return status;
}

Status Runner::run_tensor(JobState& job) {
  if (Status status = preparer_.check(job.spec); !status.ok()) return status;
  const TensorSpec spec = spec_of(job.spec);
  SchemeContext context = context_of(job.spec.name, spec, job.spec.op);
  PlanOptions plan_options = plan_options_;
  plan_options.single_chunk = options_.wire.partition == PartitionKind::kRange;
  {
    std::lock_guard lock(known_mutex_);
    TensorState state = known(job.spec.name, spec, job.spec.starts_dense && job.spec.allow_dense);
    if (!job.spec.allow_dense) state.dense = false;
    context.plan = make_plan(spec, driver_.size(), state, plan_options);
  }
  if (Status status = check_countable(spec, context.plan); !status.ok()) return status;
  context.job.plan_digest = plan_digest(context.plan);
  job.result.report.scheme = context.plan.scheme;
  job.result.report.width = context.plan.width;
  job.result.report.chunk_ends = context.plan.chunk_ends;
  if (context.plan.scheme == SchemeId::kDense) {
    if (!job.spec.allow_dense) {
      return make_error(ErrorKind::kUnsupported,
                        "scheme 'dense' is an all-reduce by the caller, and there is none here; "
                        "use 'dense_ring'");
    }
    return run_dense(job, spec);
  }
  return run_sparse(job, context);
}

Status Runner::run_sparse(JobState& job, SchemeContext& context) {
  UnitSource source = preparer_.source(job.spec, context.plan.width);
  context.source = &source;
  context.sink = &job.sink;
  if (const auto* dense = std::get_if<DenseView>(&job.spec.input)) {
    job.sink.start_dense(dense->data, context.unit_bytes());
    context.dense_data = dense->data;
  } else {
    job.sink.start_coo(context.spec.row_elems / std::max<std::uint64_t>(context.plan.width, 1),
                       context.unit_bytes());
  }
  KnownCounts counts;
  context.counts = &counts;
  SchemeTask task = start_scheme(context);
  if (Status status = drive(task, {&context.job, 1}); !status.ok()) return status;
  if (!job.sink.is_complete()) {
    return make_error(ErrorKind::kCorruptMessage, "the last row of a COO tensor came in part only");
  }
  JobReport& report = job.result.report;
  if (!counts.units.empty()) {
    report.units = counts.units[static_cast<std::size_t>(driver_.rank().value)];
  }
  report.union_units = counts.union_units;
  std::lock_guard lock(known_mutex_);
  after_sparse(context.spec, plan_options_, std::move(counts),
               known(job.spec.name, context.spec, false));
  return {};
}

/// What this rank alone can find wrong with a reduce-scatter; then its width.
Result<std::uint64_t> Runner::check_shard(const JobSpec& job) const {
  if (Status status = preparer_.check(job); !status.ok()) return status.error();
  const TensorSpec spec = spec_of(job);
  const auto width = shard_width(spec, driver_.size(), job.shard->layout);
  if (!width.ok()) return width;
  const std::uint64_t elems = shard_elems(spec, driver_.size(), driver_.rank(), job.shard->layout);
  const Status status = check_output(job.shard->data, elems * dtype_bytes(spec.dtype),
                                     std::get<DenseView>(job.input));
  if (!status.ok()) return status.error();
  return width;
}

Status Runner::run_shard(JobState& job) {
  const auto width = check_shard(job.spec);
  if (!width.ok()) {
    Error why = width.error();
    why.culprit = driver_.rank();
    return why;
  }
  const ShardView& shard = *job.spec.shard;
  const bool rows = shard.layout == ShardLayout::kRows;
  SchemeContext context = context_of(job.spec.name, spec_of(job.spec), job.spec.op);
  context.plan.width = width.value();
  context.job.call = rows ? JobCall::kScatterRows : JobCall::kScatterColumns;
  context.job.plan_digest = plan_digest(context.plan);
  UnitSource source = preparer_.source(job.spec, context.plan.width);
  context.source = &source;
  JobReport& report = job.result.report;
  report.call = context.job.call;
  report.width = context.plan.width;
  SchemeTask task = reduce_scatter(context, {shard.layout, shard.data, &report.shard});
  if (Status status = drive(task, {&context.job, 1}); !status.ok()) return status;
  for (const std::uint64_t units : report.shard.sent_units) report.units += units;
  report.union_units = report.shard.shard_units;
  return {};
}

Status Runner::agree_on(const std::vector<JobHeader>& headers,
                        const std::vector<std::string>& names,
                        std::vector<std::vector<JobHeader>>& theirs) {
  SchemeContext context =
      context_of(names.empty() ? "" : names.front(), TensorSpec(), ReduceOp::kSum);
  SchemeTask task = agree(context, headers, names, theirs);
  return drive(task, headers);
}

Status Runner::run_dense(JobState& job, const TensorSpec& spec) {
  std::vector<JobHeader> headers = {header_of(job.spec.name, spec, job.spec.op)};
  DenseItem item{job.spec.name, spec, nullptr, job.spec.op, true};
  {
    std::lock_guard lock(known_mutex_);
    const TensorState& state = known(job.spec.name, spec, job.spec.starts_dense);
    const auto* dense = std::get_if<DenseView>(&job.spec.input);
    if (probe_is_due(state) && dense != nullptr) {
      probe_dense(table_, spec, dense->data, state.dense_rounds, headers.front());
    } else if (probe_is_due(state)) {
      probe_coo(spec, std::get<CooView>(job.spec.input).entries, headers.front());
    }
  }
  std::vector<std::vector<JobHeader>> theirs;
  if (Status status = agree_on(headers, {job.spec.name}, theirs); !status.ok()) return status;
  remember_dense({item}, theirs);
  job.result.outcome = Outcome::kUseDense;
  return {};
}

Status Runner::run_agreement(JobState& job) {
  if (job.items.size() > std::numeric_limits<std::uint16_t>::max()) {
    return make_error(ErrorKind::kCapacity, "more than 65535 tensors in one agreement");
  }
  std::vector<JobHeader> headers;
  std::vector<std::string> names;
  {
    std::lock_guard lock(known_mutex_);
    for (const DenseItem& item : job.items) {
      headers.push_back(header_of(item.name, item.spec, item.op));
      names.push_back(item.name);
      if (!item.probe) continue;
      const TensorState& state = known(item.name, item.spec, true);
      if (item.data != nullptr && probe_is_due(state)) {
        probe_dense(table_, item.spec, item.data, state.dense_rounds, headers.back());
      }
    }
  }
  std::vector<std::vector<JobHeader>> theirs;
  if (Status status = agree_on(headers, names, theirs); !status.ok()) return status;
  remember_dense(job.items, theirs);
  job.result.outcome = Outcome::kUseDense;
  return {};
}

void Runner::remember_dense(const std::vector<DenseItem>& items,
                            const std::vector<std::vector<JobHeader>>& theirs) {
  std::lock_guard lock(known_mutex_);
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!items[i].probe) continue;
    std::vector<JobHeader> all;
    for (const auto& of_rank : theirs) all.push_back(of_rank[i]);
    TensorState& state = known(items[i].name, items[i].spec, true);
    after_dense(items[i].spec, plan_options_, all, state);
  }
}

}  // namespace zensync
