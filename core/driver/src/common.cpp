// The check of an Exchange's arguments and the wording of errors, shared by all drivers.
// Place: driver, level 4, private. Pure functions, callable from any thread; they own nothing.
// Errors are for people who read a log of one rank only, so each text names the other ranks.
#include "common.hpp"

#include <algorithm>

namespace zensync::driver {
namespace {

Error invalid(Rank self, std::string message) {
  return Error{ErrorKind::kInvalid, std::move(message), self, self, {}};
}

bool is_peer(Rank peer, Rank self, int size) {
  return peer.value >= 0 && peer.value < size && peer != self;
}

}  // namespace

Status check_exchange(const Exchange& exchange, Rank self, int size) {
  for (const Send& send : exchange.sends) {
    if (!is_peer(send.to, self, size)) {
      return invalid(self, "send to rank " + std::to_string(send.to.value) +
                               ": not a peer of rank " + std::to_string(self.value) + " of " +
                               std::to_string(size));
    }
    if (send.message.size() > kMaxMessageBytes) {
      return invalid(self, "a message of " + std::to_string(send.message.size()) +
                               " bytes is longer than a frame can hold");
    }
  }
  for (const Recv& recv : exchange.recvs) {
    if (!is_peer(recv.from, self, size)) {
      return invalid(self, "receive from rank " + std::to_string(recv.from.value) +
                               ": not a peer of rank " + std::to_string(self.value) + " of " +
                               std::to_string(size));
    }
    if (recv.into == nullptr) {
      return invalid(self, "receive from rank " + std::to_string(recv.from.value) + ": no buffer");
    }
  }
  return {};
}

std::string list_ranks(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i != 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

Error deadline_error(Rank self, const std::vector<int>& delivering,
                     const std::vector<int>& taking) {
  std::string message = "deadline passed:";
  if (!delivering.empty()) message += " nothing (more) came from " + list_ranks(delivering);
  if (!taking.empty()) {
    if (!delivering.empty()) message += ';';
    message += " earlier messages were not taken by " + list_ranks(taking);
  }
  Rank culprit;
  if (!delivering.empty()) {
    culprit.value = *std::min_element(delivering.begin(), delivering.end());
  } else if (!taking.empty()) {
    culprit.value = *std::min_element(taking.begin(), taking.end());
  }
  return Error{ErrorKind::kDeadline, std::move(message), self, culprit, {}};
}

Error lost_error(Rank self, Rank peer, const std::string& how) {
  return Error{ErrorKind::kPeerLost,
               "rank " + std::to_string(peer.value) + " went away: " + how,
               self,
               peer,
               {}};
}

Error too_long_error(Rank self, Rank peer, std::uint64_t length_bytes,
                     std::uint64_t capacity_bytes) {
  return Error{ErrorKind::kCorruptMessage,
               "rank " + std::to_string(peer.value) + " announced a message of " +
                   std::to_string(length_bytes) + " bytes where at most " +
                   std::to_string(capacity_bytes) + " can be expected",
               self,
               peer,
               {}};
}

Error reported_by(Rank self, Error why) {
  if (why.rank.value < 0) why.rank = self;
  return why;
}

}  // namespace zensync::driver
