// Who is slow, silent or gone; see watch.hpp. Place: driver, level 4, private.
// A peer is behind when it has begun fewer jobs (or fewer exchanges of this job, or fewer dense
// all-reduces) than this rank: it is the one that is waited for, or it waits for somebody who is.
// A peer is given up only while this rank waits, and only when its heartbeat stopped as well: a
// rank that compiles or saves for minutes is slow, not dead. Where no peer is heard (there are no
// control connections) nobody is judged, and notices say that.
#include "watch.hpp"

#include <algorithm>

#include "common.hpp"

namespace zensync::driver {
namespace {

std::string seconds_text(milliseconds time) {
  const auto tenths = time.count() / 100;
  std::string text = std::to_string(tenths / 10);
  if (tenths < 100 && tenths % 10 != 0) text += "." + std::to_string(tenths % 10);
  return text + " s";
}

constexpr milliseconds kQuiet{3000};  // so long without a beat is worth a word

}  // namespace

Watch::Watch(Rank self, int size, Limits limits)
    : self_(self), limits_(limits), peers_(static_cast<std::size_t>(size)) {}

void Watch::begin(WaitKind kind, const std::string& tensor, const char* phase) {
  end(kind);  // the exchange before, if there was one
  Wait& wait = waits_[static_cast<std::size_t>(kind)];
  wait.active = true;
  wait.warned = false;
  wait.tensor.assign(tensor);
  wait.phase = phase;
  wait.waited = milliseconds{0};
  wait.next_warning = limits_.warn_after;
}

void Watch::end(WaitKind kind) {
  Wait& wait = waits_[static_cast<std::size_t>(kind)];
  const bool was_told = wait.active && wait.warned;
  wait.active = false;  // over, also where there is no memory to say so
  if (was_told) {
    pending_.push_back(describe(wait, kind) + " is over after " + seconds_text(wait.waited));
  }
}

void Watch::heard(Rank peer, const Progress& progress) {
  at(peer).progress = progress;
  at(peer).silence = milliseconds{0};
}

void Watch::left(Rank peer, bool in_good_order) {
  at(peer).left = true;
  at(peer).in_good_order = in_good_order;
}

bool Watch::is_waiting() const { return waits_[0].active || waits_[1].active; }

std::string Watch::awaited() const {
  for (const Wait& wait : waits_) {
    if (wait.active) return wait.tensor;
  }
  return {};
}

std::optional<Error> Watch::missed_by(Rank peer) const {
  const Peer& gone = at(peer);
  const auto& [job, dense] = waits_;
  if (!gone.in_good_order) return {};
  const bool misses_job = job.active && gone.progress.jobs_done < own_.jobs_begun;
  const bool misses_dense = dense.active && gone.progress.dense_begun < own_.dense_begun;
  if (!misses_job && !misses_dense) return {};
  Error error =
      lost_error(self_, peer,
                 misses_job ? "it closed its State, or exited, before this job"
                            : "it closed its State, or exited, before this dense all-reduce");
  error.tensor = misses_job ? job.tensor : dense.tensor;
  return error;
}

bool Watch::is_behind(const Progress& theirs, WaitKind kind) const {
  if (kind == WaitKind::kDense) return theirs.dense_begun < own_.dense_begun;
  if (theirs.jobs_begun != own_.jobs_begun) return theirs.jobs_begun < own_.jobs_begun;
  return theirs.jobs_done < own_.jobs_begun && theirs.exchange < own_.exchange;
}

Rank Watch::behind() const {
  Rank found;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if (rank == self_.value || at(Rank{rank}).left) continue;  // nothing is known of who left
    const Progress& theirs = at(Rank{rank}).progress;
    bool is = false;
    for (const WaitKind kind : {WaitKind::kJob, WaitKind::kDense}) {
      const bool waits = waits_[static_cast<std::size_t>(kind)].active;
      is = is || (waits && is_behind(theirs, kind));
    }
    if (!is) continue;
    const auto place = [](const Progress& p) { return std::pair(p.jobs_begun, p.exchange); };
    if (found.value < 0 || place(theirs) < place(at(found).progress)) found.value = rank;
  }
  return found;
}

std::string Watch::describe(const Wait& wait, WaitKind kind) const {
  std::string text = "rank " + std::to_string(self_.value) + ": waiting in ";
  text += kind == WaitKind::kDense ? "the dense all-reduce" : std::string("'") + wait.phase + "'";
  if (!wait.tensor.empty()) text += " of tensor '" + wait.tensor + "'";
  if (kind == WaitKind::kJob) text += " (job " + std::to_string(own_.jobs_begun) + ")";
  return text;
}

std::string Watch::describe_peers(WaitKind kind) const {
  std::string text;
  bool anybody = false;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    const Peer& peer = at(Rank{rank});
    if (rank == self_.value || peer.left) continue;
    anybody = true;
    const bool behind = is_behind(peer.progress, kind);
    if (!behind && peer.silence < kQuiet) continue;
    text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank);
    if (behind) {
      const bool same_job = kind == WaitKind::kJob && peer.progress.jobs_begun == own_.jobs_begun;
      text += same_job ? " is at an earlier exchange of it" : " has not come to it";
    } else {
      text += " does not answer";
    }
    text += peer.silence < kQuiet
                ? ", its process lives"
                : ", nothing was heard from its process for " + seconds_text(peer.silence);
  }
  if (!anybody) return "there are no heartbeats, so it is not known for whom";
  if (text.empty()) return "no rank is behind: the links are slow, or the message is large";
  return text;
}

Watch::Verdict Watch::tick(milliseconds elapsed) {
  Verdict verdict;
  verdict.notices.swap(pending_);
  for (Peer& peer : peers_) peer.silence += elapsed;
  for (const WaitKind kind : {WaitKind::kJob, WaitKind::kDense}) {
    Wait& wait = waits_[static_cast<std::size_t>(kind)];
    if (!wait.active) continue;
    wait.waited += elapsed;
    if (wait.waited < wait.next_warning) continue;
    wait.next_warning = 2 * wait.waited;
    wait.warned = true;
    verdict.notices.push_back(describe(wait, kind) + " for " + seconds_text(wait.waited) + ": " +
                              describe_peers(kind));
  }
  if (!is_waiting()) return verdict;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    const Peer& peer = at(Rank{rank});
    if (rank == self_.value || peer.left || peer.silence < limits_.silent_after) continue;
    verdict.fault = lost_error(self_, Rank{rank},
                               "nothing was heard from its process for " +
                                   seconds_text(peer.silence) + " (silent_after_s)");
    verdict.fault->tensor = awaited();
    break;
  }
  return verdict;
}

}  // namespace zensync::driver
