// Counting who says what about a job; see minority.hpp. Place: engine, level 5, private.
// What a message says is its job headers, without what each rank measured for itself. Messages
// without any (all but the first of a job) say nothing.
#include "minority.hpp"

#include <algorithm>
#include <map>
#include <string>

#include "zensync/codec/message.hpp"

namespace zensync {
namespace {

void add(std::string& said, JobHeader header) {
  header.probe_rows = header.probe_nonzero_rows = header.probe_nonzero_elems = 0;
  said.append(reinterpret_cast<const char*>(&header), sizeof header);
}

/// Empty if the message says nothing.
std::string said_in(std::span<const std::byte> message, bool verify) {
  Expected expected;
  expected.verify = verify;
  const auto parsed = parse_message(message, expected);
  std::string said;
  if (!parsed.ok()) return said;
  for (std::size_t i = 0; i < parsed.value().header.job_headers; ++i) {
    add(said, job_header_of(parsed.value(), i));
  }
  return said;
}

using Groups = std::map<std::string, std::vector<int>>;  // ranks in order

/// The largest group, null if there are several.
const std::vector<int>* largest(const Groups& groups) {
  const std::vector<int>* best = nullptr;
  bool is_alone = false;
  for (const auto& [said, ranks] : groups) {
    if (best != nullptr && ranks.size() < best->size()) continue;
    is_alone = best == nullptr || ranks.size() > best->size();
    best = &ranks;
  }
  return is_alone ? best : nullptr;
}

}  // namespace

Error blame_minority(Error why, const Exchange& exchange, const Saying& own, bool verify) {
  std::map<int, std::string> said;
  for (const JobHeader& header : own.jobs) add(said[own.rank.value], header);
  for (const Recv& recv : exchange.recvs)
    said[recv.from.value] = said_in(recv.into->bytes(), verify);
  Groups groups;
  for (const auto& [rank, text] : said) {
    if (!text.empty()) groups[text].push_back(rank);
  }
  const std::vector<int>* most = largest(groups);
  if (most == nullptr) return why;
  const auto is_right = [&](int rank) {
    return std::find(most->begin(), most->end(), rank) != most->end();
  };
  if (!is_right(own.rank.value)) {
    why.culprit = own.rank;
    why.message = "rank " + std::to_string(own.rank.value) +
                  " differs from most ranks, of which it says: " + why.message;
  } else if (is_right(why.culprit.value)) {
    for (const auto& [rank, text] : said) {
      if (text.empty() || is_right(rank)) continue;
      why.culprit = Rank{rank};
      break;
    }
  }
  return why;
}

}  // namespace zensync
