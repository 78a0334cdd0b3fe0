// The driver of property cases; see property_run.hpp. Place: tests of the engine.
// Contexts are made as the engine's runner makes them; sources by its Preparer.
// A message lies in the lane of its ordered pair of ranks, as a view of the sender's memory until
// it must be copied: at once, or (late_sends) when the sender goes on from its next exchange.
// Owner: a TableTop holds all of one case; workspaces are the pool's. Threads: one.
#include "property_run.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>

#include "element.hpp"
#include "zensync/base/hash.hpp"
#include "zensync/plan/plan.hpp"

namespace zensync::test {
namespace {

struct Message {
  std::span<const std::byte> view;
  std::vector<std::byte> copy;
  std::uint64_t exchange = 0;
  void keep() {
    if (!copy.empty()) return;
    copy.assign(view.begin(), view.end());
    view = copy;
  }
};

struct Actor {
  SchemeContext context;
  std::optional<UnitSource> source;
  std::optional<SchemeTask> task;
  const Exchange* exchange = nullptr;  ///< the one it waits in; null: ended
  std::size_t left = 0;                ///< recvs still to come
  std::vector<bool> filled;
  std::uint64_t exchanges = 0;
};

JobSpec view_of(const PropertyCase& given, Inputs& inputs, std::size_t rank) {
  static const std::int64_t kNoIds = 0;
  RankInput& input = inputs.ranks[rank];
  const TensorSpec& spec = given.spec;
  const std::int64_t* indices = input.indices.empty() ? &kNoIds : input.indices.data();
  JobSpec job;
  job.op = given.op;
  if (given.is_coo()) {
    job.input = CooView{indices,   inputs.data(rank), input.indices.size(),
                        spec.rows, spec.row_elems,    spec.dtype};
    return job;
  }
  DenseView view{inputs.data(rank), spec.rows, spec.row_elems, spec.dtype, nullptr, 0};
  if (given.hold == Hold::kDenseIds) {
    view.ids = indices;
    view.ids_count = input.indices.size();
  }
  job.input = view;
  return job;
}

std::uint64_t digest_of(const RankInput& input) {
  const std::size_t bytes = input.indices.size() * sizeof(std::int64_t);
  return digest64(input.memory.data(), input.memory.size()) ^
         mix64(digest64(input.indices.data(), bytes));
}

class TableTop {
 public:
  TableTop(const PropertyCase& given, Inputs& inputs, RankPool& pool, Fault* fault)
      : given_(given),
        inputs_(inputs),
        memory_(pool.of(given.size)),
        fault_(fault),
        topology_(flat_topology(given.size)),
        actors_(static_cast<std::size_t>(given.size)),
        lanes_(actors_.size() * actors_.size()) {
    outcome_.ranks.resize(actors_.size());
  }

  Outcome run() {
    for (std::size_t rank = 0; rank < actors_.size(); ++rank) seat(rank);
    for (std::size_t rank = 0; rank < actors_.size() && is_well(); ++rank) resume(rank);
    std::uint64_t round = 0;
    bool moved = true;
    while (moved && is_well()) {
      moved = false;
      const std::uint64_t hash = mix64(given_.seed + ++round);
      for (std::size_t i = 0; i < actors_.size() && is_well(); ++i) {
        const std::size_t place = hash % 2 != 0 ? i : actors_.size() - 1 - i;
        moved |= visit((place + (hash >> 8)) % actors_.size());
      }
    }
    if (is_well()) check_end();
    return std::move(outcome_);
  }

 private:
  bool is_well() const { return outcome_.error.empty(); }
  void fail(std::size_t rank, const std::string& what) {
    outcome_.error = "rank " + std::to_string(rank) + ": " + what;
  }
  std::deque<Message>& lane(std::size_t from, std::size_t to) {
    return lanes_[from * actors_.size() + to];
  }

  void seat(std::size_t rank) {
    RankMemory& memory = *memory_[rank];
    Preparer& preparer = given_.mixed_kernels ? memory.mixed_preparer : memory.preparer;
    SchemeContext& context = actors_[rank].context;
    context.kernels = given_.mixed_kernels ? &memory.mixed_table : &kernels::active();
    context.rank = Rank{static_cast<int>(rank)};
    context.topology = &topology_;
    context.job.key = given_.key;
    context.job.rows = given_.spec.rows;
    context.job.row_elems = given_.spec.row_elems;
    context.job.plan_digest = plan_digest(given_.plan);
    context.job.sequence = static_cast<std::uint32_t>(given_.seed);
    context.job.size = static_cast<std::uint16_t>(given_.size);
    context.job.dtype = given_.spec.dtype;
    context.job.layout = given_.spec.layout;
    context.job.op = given_.op;
    context.tensor = "property";
    context.spec = given_.spec;
    context.plan = given_.plan;
    context.wire = given_.wire;
    context.workspace = &memory.workspace;
    start(rank, preparer);
  }

  void start(std::size_t rank, Preparer& preparer) {
    Actor& actor = actors_[rank];
    RankOutcome& result = outcome_.ranks[rank];
    const JobSpec job = view_of(given_, inputs_, rank);
    if (given_.is_coo()) result.input_digest = digest_of(inputs_.ranks[rank]);
    if (Status status = preparer.check(job); !status.ok()) fail(rank, status.error().message);
    actor.source = preparer.source(job, given_.plan.width);
    actor.context.source = &*actor.source;
    actor.context.sink = &result.sink;
    actor.context.counts = &result.counts;
    if (given_.is_coo()) {
      result.sink.start_coo(given_.parts(), actor.context.unit_bytes());
    } else {
      result.sink.start_dense(inputs_.data(rank), actor.context.unit_bytes());
      actor.context.dense_data = inputs_.data(rank);
    }
    actor.task.emplace(start_scheme(actor.context));
  }

  /// Lets the scheme go on to its next exchange. What it sent before the one that has just ended
  /// may be overwritten now.
  void resume(std::size_t rank) {
    Actor& actor = actors_[rank];
    for (std::size_t to = 0; to < actors_.size(); ++to) {
      for (Message& message : lane(rank, to)) {
        if (message.exchange < actor.exchanges) message.keep();
      }
    }
    actor.exchange = actor.task->next();
    if (actor.exchange == nullptr) {
      if (!actor.task->status().ok()) fail(rank, actor.task->status().error().message);
      return;
    }
    ++actor.exchanges;
    actor.left = actor.exchange->recvs.size();
    actor.filled.assign(actor.left, false);
    for (const Send& send : actor.exchange->sends) post(rank, send);
  }

  void post(std::size_t rank, const Send& send) {
    const auto to = static_cast<std::size_t>(send.to.value);
    if (to >= actors_.size() || to == rank) return fail(rank, "sends to a rank that is none");
    std::deque<Message>& queue = lane(rank, to);
    queue.push_back({send.message, {}, actors_[rank].exchanges});
    if (!given_.late_sends) queue.back().keep();
    outcome_.ranks[rank].traffic.sent_bytes += send.message.size() + kFramePrefixBytes;
  }

  /// Receives what is there and goes on if that was all; whether anything happened.
  bool visit(std::size_t rank) {
    Actor& actor = actors_[rank];
    if (actor.exchange == nullptr) return false;
    bool moved = false;
    for (std::size_t i = 0; i < actor.filled.size() && is_well(); ++i) {
      const Recv& recv = actor.exchange->recvs[i];
      std::deque<Message>& queue = lane(static_cast<std::size_t>(recv.from.value), rank);
      if (actor.filled[i] || queue.empty()) continue;
      moved = true;
      if (!is_lost()) {
        deliver(rank, recv, queue.front().view);
        actor.filled[i] = true;
        --actor.left;
      }
      queue.pop_front();
    }
    if (actor.left != 0 || !is_well()) return moved;
    resume(rank);
    return true;
  }

  void deliver(std::size_t rank, const Recv& recv, std::span<const std::byte> message) {
    if (message.size() > recv.capacity_bytes) fail(rank, "a message beyond its capacity");
    recv.into->resize_discard(message.size());
    std::memcpy(recv.into->data(), message.data(), message.size());
    outcome_.ranks[rank].traffic.received_bytes += message.size() + kFramePrefixBytes;
    if (is_due()) damage(*recv.into);
    ++delivered_;
  }

  /// Whether the fault may hit the message that is delivered now.
  bool is_due() const {
    return fault_ != nullptr && !fault_->was_done && delivered_ >= fault_->message;
  }

  bool is_lost() {
    if (!is_due() || fault_->what != Fault::What::kLose) return false;
    fault_->was_done = true;
    return true;
  }

  void damage(Buffer& message) {
    if (fault_->what == Fault::What::kEmpty) {
      message.resize_keep(0);
      fault_->was_done = true;
      return;
    }
    MessageHeader header;
    std::memcpy(&header, message.data(), sizeof header);
    std::size_t begin = 0;
    std::size_t length = message.size();
    if (fault_->pull_values_only) {
      begin = sizeof header + header.job_headers * sizeof(JobHeader);
      length = message.size() - begin - header.index_bytes;
      if (header.kind != MessageKind::kPull || length == 0) return;
    }
    message.data()[begin + fault_->at % length] ^= std::byte{1};
    fault_->was_done = true;
  }

  void check_end() {
    for (std::size_t rank = 0; rank < actors_.size(); ++rank) {
      if (actors_[rank].exchange != nullptr) {
        return fail(rank, std::string("waits for ever in ") + actors_[rank].exchange->phase);
      }
      if (!outcome_.ranks[rank].sink.is_complete() && given_.is_coo()) {
        return fail(rank, "the last row came in part only");
      }
    }
    for (const auto& queue : lanes_) {
      if (!queue.empty()) return fail(0, "a message that nobody received");
    }
  }

  const PropertyCase& given_;
  Inputs& inputs_;
  std::vector<std::unique_ptr<RankMemory>>& memory_;
  Fault* fault_;
  Topology topology_;
  Outcome outcome_;
  std::vector<Actor> actors_;
  std::vector<std::deque<Message>> lanes_;
  std::uint64_t delivered_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<RankMemory>>& RankPool::of(int size) {
  static const std::vector<const kernels::Table*> kTables = kernels::available();
  auto& ranks = pool_[size];
  for (int rank = static_cast<int>(ranks.size()); rank < size; ++rank) {
    const kernels::Table& other = *kTables[static_cast<std::size_t>(rank) % kTables.size()];
    ranks.push_back(std::make_unique<RankMemory>(size, kernels::active(), other));
  }
  return ranks;
}

Outcome run_case(const PropertyCase& given, Inputs& inputs, RankPool& pool, Fault* fault) {
  return TableTop(given, inputs, pool, fault).run();
}

}  // namespace zensync::test
