// Rows for whoever asks; see gather_rows.hpp. Place: scheme, level 3.
//
// Exchange 1, "ask": to each owner the distinct ids that this rank needs of it, ascending, as a set
// of slots without values (so an id costs bits, as in a push). Exchange 2, "answer": the asked
// units of the owner's shard, in order of their slots, as values without an index. Each rank copies
// what came to the places of its ids. With columns every rank owns a part of each row, so all are
// asked alike.
#include "zensync/scheme/gather_rows.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "encode.hpp"
#include "receive.hpp"

namespace zensync {
namespace {

using kernels::kBlockSlots;

class GatherJob {
 public:
  GatherJob(SchemeContext& context, const RowRequest& request)
      : context_(context),
        work_(*context.workspace),
        request_(request),
        by_rows_(request.layout == ShardLayout::kRows),
        slots_(by_rows_ ? div_ceil(context.spec.rows, static_cast<std::uint64_t>(context.size()))
                        : context.spec.rows),
        wanted_(request.ids.begin(), request.ids.end()) {
    std::sort(wanted_.begin(), wanted_.end());
    wanted_.erase(std::unique(wanted_.begin(), wanted_.end()), wanted_.end());
    counts_.sent_units.assign(static_cast<std::size_t>(context.size()), 0);
    counts_.received_units = counts_.sent_units;
  }

  void ask() {
    const std::uint64_t capacity = longest_message(slots_, 0, true);
    for (int owner = 0; owner < context_.size(); ++owner) {
      const auto index = static_cast<std::size_t>(owner);
      const auto ids = wanted_of(owner);
      counts_.sent_units[index] = ids.size();
      if (owner == context_.rank.value) continue;
      MessageWriter& writer = work_.push[0][index];
      MessageHeader header = make_header(context_, MessageKind::kAsk, 0);
      header.values_dtype = context_.spec.dtype;
      writer.begin(*context_.kernels, header, {&context_.job, 1}, slots_);
      write_ids(ids, first_row(owner), writer);
      work_.exchange.sends.push_back({Rank{owner}, writer.finish(context_.wire.verify)});
      work_.exchange.recvs.push_back({Rank{owner}, capacity, &work_.received_push[index]});
    }
    work_.exchange.phase = "ask";
  }

  Status read_asks() {
    for (int peer = 0; peer < context_.size(); ++peer) {
      if (peer == context_.rank.value) continue;
      const auto index = static_cast<std::size_t>(peer);
      if (Status status = read_asked(peer, work_.sets[index]); !status.ok()) return status;
      counts_.received_units[index] = work_.sets[index].units();
    }
    return {};
  }

  void answer() {
    for (int peer = 0; peer < context_.size(); ++peer) {
      if (peer == context_.rank.value) continue;
      const auto index = static_cast<std::size_t>(peer);
      const SparseSet& set = work_.sets[index];
      MessageWriter& writer = work_.push[1][index];
      MessageHeader header = make_header(context_, MessageKind::kAnswer, 1);
      header.codec = IndexCodec::kNone;
      header.values_dtype = context_.spec.dtype;
      writer.begin(*context_.kernels, header, {}, 0);
      write_units(set, writer);
      work_.exchange.sends.push_back({Rank{peer}, writer.finish(context_.wire.verify)});
      const std::uint64_t bytes = wanted_of(peer).size() * context_.unit_bytes();
      work_.exchange.recvs.push_back(
          {Rank{peer}, message_bytes(0, 1, bytes, 0), &work_.received_pull[index]});
    }
    work_.exchange.phase = "answer";
  }

  /// Checks all answers, then copies their units to the places of the ids.
  Status take() {
    std::vector<const std::byte*> units(static_cast<std::size_t>(context_.size()), nullptr);
    for (int owner = 0; owner < context_.size(); ++owner) {
      if (owner == context_.rank.value) continue;
      const auto index = static_cast<std::size_t>(owner);
      auto values = read_answer(owner);
      if (!values.ok()) return values.status();
      units[index] = values.value().data();
    }
    const auto self = static_cast<std::size_t>(context_.rank.value);
    counts_.received_units[self] = counts_.sent_units[self];
    counts_.shard_units = wanted_.size();
    for (std::size_t i = 0; i < request_.ids.size(); ++i) put(i, units);
    if (request_.counts != nullptr) *request_.counts = std::move(counts_);
    return {};
  }

 private:
  std::int64_t first_row(int owner) const {
    return by_rows_ ? static_cast<std::int64_t>(slots_) * owner : 0;
  }

  /// The distinct ids that `owner` is asked for.
  std::span<const std::int64_t> wanted_of(int owner) const {
    if (!by_rows_) return wanted_;
    const auto begin = std::lower_bound(wanted_.begin(), wanted_.end(), first_row(owner));
    return {begin, std::lower_bound(begin, wanted_.end(), first_row(owner + 1))};
  }

  void write_ids(std::span<const std::int64_t> ids, std::int64_t first, MessageWriter& writer) {
    std::size_t i = 0;
    while (i < ids.size()) {
      const std::uint64_t block = static_cast<std::uint64_t>(ids[i] - first) / kBlockSlots;
      offsets_.clear();
      for (; i < ids.size(); ++i) {
        const auto slot = static_cast<std::uint64_t>(ids[i] - first);
        if (slot / kBlockSlots != block) break;
        offsets_.push_back(static_cast<std::uint16_t>(slot % kBlockSlots));
      }
      writer.add_block(block, offsets_);
    }
  }

  Status read_asked(int peer, SparseSet& set) {
    const bool rows = by_rows_;
    const Partition partition(PartitionKind::kRange, context_.spec.rows, rows ? context_.size() : 1,
                              0);
    Incoming incoming;
    incoming.from = Rank{peer};
    incoming.expected = expect(context_, MessageKind::kAsk, 0, slots_);
    incoming.expected.job_headers = 1;
    incoming.expected.width = 0;  // ids carry no values
    incoming.partition = &partition;
    incoming.owner = rows ? context_.rank : Rank{0};
    incoming.message = work_.received_push[static_cast<std::size_t>(peer)].bytes();
    return receive_set(context_, incoming, set).status();
  }

  void write_units(const SparseSet& set, MessageWriter& writer) {
    const std::size_t bytes = context_.unit_bytes();
    std::byte* to = writer.add_values(set.units() * bytes);
    for (const BlockRun& run : set.runs) {
      for (std::uint32_t i = 0; i < run.count; ++i, to += bytes) {
        const std::uint64_t slot = run.block * kBlockSlots + set.offsets[run.begin + i];
        std::memcpy(to, own_unit(slot), bytes);
      }
    }
  }

  const std::byte* own_unit(std::uint64_t slot) const {
    return static_cast<const std::byte*>(request_.shard) + slot * context_.unit_bytes();
  }

  Result<std::span<const std::byte>> read_answer(int owner) {
    Incoming incoming;
    incoming.from = Rank{owner};
    incoming.expected = expect(context_, MessageKind::kAnswer, 1, 0);
    incoming.message = work_.received_pull[static_cast<std::size_t>(owner)].bytes();
    auto parsed = receive_message(context_, incoming);
    if (!parsed.ok()) return parsed.status().error();
    const ParsedMessage& message = parsed.value();
    const MessageHeader& header = message.header;
    if (header.kind != MessageKind::kAnswer || header.sequence != context_.job.sequence ||
        header.chunk != 1 || header.job_headers != 0) {
      return at_peer(
          context_, Rank{owner},
          make_error(ErrorKind::kMismatch, "the peer is at another place than 'answer'"));
    }
    const std::size_t bytes = wanted_of(owner).size() * context_.unit_bytes();
    if (header.codec != IndexCodec::kNone || header.values_dtype != context_.spec.dtype ||
        message.index.size() != 0 || message.values.size() != bytes) {
      return at_peer(context_, Rank{owner},
                     make_error(ErrorKind::kCorruptMessage,
                                "an answer of " + std::to_string(message.values.size()) +
                                    " bytes, not " + std::to_string(bytes)));
    }
    return message.values;
  }

  /// The row of id `i`: from its owner, or from all owners part by part.
  void put(std::size_t i, const std::vector<const std::byte*>& units) {
    const std::int64_t id = request_.ids[i];
    const std::size_t bytes = context_.unit_bytes();
    const auto n = static_cast<std::size_t>(context_.size());
    auto* to = static_cast<std::byte*>(request_.output) + i * (by_rows_ ? 1 : n) * bytes;
    const auto rank = [&](std::span<const std::int64_t> ids) {
      return static_cast<std::size_t>(std::lower_bound(ids.begin(), ids.end(), id) - ids.begin());
    };
    const auto copy = [&](std::size_t owner, std::size_t at, std::byte* into) {
      const bool self = owner == static_cast<std::size_t>(context_.rank.value);
      const std::int64_t first = first_row(static_cast<int>(owner));
      const std::byte* from =
          self ? own_unit(static_cast<std::uint64_t>(id - first)) : units[owner] + at * bytes;
      std::memcpy(into, from, bytes);
    };
    if (by_rows_) {
      const auto owner = static_cast<std::size_t>(static_cast<std::uint64_t>(id) / slots_);
      copy(owner, rank(wanted_of(static_cast<int>(owner))), to);
      return;
    }
    const std::size_t at = rank(wanted_);
    for (std::size_t owner = 0; owner < n; ++owner) copy(owner, at, to + owner * bytes);
  }

  SchemeContext& context_;
  Workspace& work_;
  const RowRequest& request_;
  bool by_rows_;
  std::uint64_t slots_;
  std::vector<std::int64_t> wanted_;  ///< distinct ids, ascending
  std::vector<std::uint16_t> offsets_;
  ShardCounts counts_;
};

}  // namespace

Status check_ids(std::span<const std::int64_t> ids, std::uint64_t rows) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && static_cast<std::uint64_t>(ids[i]) < rows) continue;
    return make_error(ErrorKind::kInvalid, "row " + std::to_string(ids[i]) + " (entry " +
                                               std::to_string(i) + ") is outside the table's " +
                                               std::to_string(rows) + " rows");
  }
  return {};
}

SchemeTask gather_rows(SchemeContext& context, RowRequest request) {
  if (Status status = check_ids(request.ids, context.spec.rows); !status.ok()) co_return status;
  GatherJob job(context, request);
  Exchange& exchange = context.workspace->exchange;
  exchange.clear();
  job.ask();
  co_yield &exchange;
  // Before the exchange is cleared: who disagrees with most ranks is found from its messages.
  if (Status status = job.read_asks(); !status.ok()) co_return status;
  exchange.clear();
  job.answer();
  co_yield &exchange;
  co_return job.take();
}

}  // namespace zensync
