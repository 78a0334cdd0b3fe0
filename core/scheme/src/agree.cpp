// One round of headers before a dense all-reduce outside the core: all ranks check that they are
// about to reduce the same tensors, and share the samples of those whose density is probed.
// Place: scheme. Bytes: 48 + 64 per tensor, to each peer: a message header and a job header for
// each tensor, in order. A rank that is at a sparse job is found as well, by the job header that
// its first message carries, or by the kind of the message. Fails with kMismatch or
// kCorruptMessage.
#include <algorithm>

#include "encode.hpp"
#include "receive.hpp"
#include "zensync/scheme/context.hpp"

namespace zensync {
namespace {

Status read_items(const SchemeContext& context, const Incoming& incoming,
                  const std::vector<JobHeader>& mine, const std::vector<std::string>& names,
                  std::vector<JobHeader>& theirs) {
  auto parsed = receive_message(context, incoming);
  if (!parsed.ok()) return parsed.status();
  const ParsedMessage& message = parsed.value();
  theirs.clear();
  const std::size_t common = std::min<std::size_t>(mine.size(), message.header.job_headers);
  for (std::size_t i = 0; i < common; ++i) {
    const JobHeader header = job_header_of(message, i);
    Status status = check_job_header(mine[i], header, incoming.from, names[i]);
    if (!status.ok()) {
      status.error().rank = context.rank;
      return status;
    }
    theirs.push_back(header);
  }
  if (message.header.kind == MessageKind::kAgree && message.header.job_headers == mine.size()) {
    return {};
  }
  Error error = make_error(ErrorKind::kMismatch,
                           "rank " + std::to_string(incoming.from.value) +
                               " reduces other tensors densely than this rank, or none",
                           incoming.from);
  error.rank = context.rank;
  error.tensor = context.tensor;
  return error;
}

}  // namespace

SchemeTask agree(SchemeContext& context, const std::vector<JobHeader>& mine,
                 const std::vector<std::string>& names,
                 std::vector<std::vector<JobHeader>>& theirs) {
  Workspace& work = *context.workspace;
  Exchange& exchange = work.exchange;
  exchange.clear();
  MessageHeader header = make_header(context, MessageKind::kAgree, 0);
  header.codec = IndexCodec::kNone;
  work.pull[0].begin(*context.kernels, header, mine, 0);
  const auto bytes = work.pull[0].finish(context.wire.verify);
  for (int peer = 0; peer < context.size(); ++peer) {
    if (peer == context.rank.value) continue;
    exchange.sends.push_back({Rank{peer}, bytes});
    exchange.recvs.push_back(
        {Rank{peer}, kHeaderCapacityBytes, &work.received_push[static_cast<std::size_t>(peer)]});
  }
  exchange.phase = "agree";
  co_yield &exchange;
  theirs.assign(static_cast<std::size_t>(context.size()), {});
  for (int peer = 0; peer < context.size(); ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    if (peer == context.rank.value) {
      theirs[index] = mine;
      continue;
    }
    Incoming incoming;
    incoming.from = Rank{peer};
    incoming.message = work.received_push[index].bytes();
    incoming.expected = expect(context, MessageKind::kAgree, 0, 0);
    Status status = read_items(context, incoming, mine, names, theirs[index]);
    if (!status.ok()) co_return status;
  }
  co_return Status();
}

}  // namespace zensync
