// Who is slow, who is silent, who has left: judged from heartbeats, as plain data.
// Place: driver, level 4, private to the control connections (control.cpp), which feed it and pass
// on what it says. No clock and no I/O: time comes as the milliseconds since the last tick, so that
// tests are tables. Time in which this very process stood still is not held against its peers:
// the caller hands over at most two beats' worth per tick.
// Threads: one at a time (the caller's lock). Nothing can fail but for std::bad_alloc.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "zensync/base/result.hpp"

namespace zensync::driver {

using std::chrono::milliseconds;

/// How far a rank is, as its peers are told with every beat.
struct Progress {
  std::uint64_t jobs_begun = 0;
  std::uint64_t jobs_done = 0;
  std::uint64_t dense_begun = 0;  ///< dense all-reduces of the caller
  std::uint32_t exchange = 0;     ///< exchanges of the current job that were begun
};

/// What a rank may wait in: a job of the engine, a dense all-reduce of the caller.
enum class WaitKind : std::uint8_t { kJob, kDense };

class Watch {
 public:
  struct Limits {
    milliseconds warn_after{10000};
    milliseconds silent_after{60000};
  };
  /// What a tick brought to light.
  struct Verdict {
    std::vector<std::string> notices;  ///< one line each, for people
    std::optional<Error> fault;        ///< the first peer that must be given up
  };

  Watch(Rank self, int size, Limits limits);

  /// This rank waits for its peers from now on, until `end`.
  void begin(WaitKind kind, const std::string& tensor, const char* phase);
  void end(WaitKind kind);
  Progress& own() { return own_; }
  const Progress& own() const { return own_; }

  void heard(Rank peer, const Progress& progress);
  /// The peer closed in good order, or was lost; it is not judged any more.
  void left(Rank peer, bool in_good_order = true);
  bool has_left(Rank peer) const { return at(peer).left; }
  /// Whether this rank waits in a job that a peer which left had not done, or in a dense all-reduce
  /// that it had not begun.
  std::optional<Error> missed_by(Rank peer) const;

  /// The tensor that this rank waits for; empty if it waits for none, or none that has a name.
  std::string awaited() const;

  Verdict tick(milliseconds elapsed);

  /// The rank that is furthest behind this one in what it waits for; −1 where nobody is.
  Rank behind() const;

 private:
  struct Peer {
    Progress progress;
    milliseconds silence{0};
    bool left = false;
    bool in_good_order = false;
  };
  struct Wait {
    bool active = false;
    bool warned = false;
    std::string tensor;
    const char* phase = "";
    milliseconds waited{0};
    milliseconds next_warning{0};
  };

  const Peer& at(Rank peer) const { return peers_[static_cast<std::size_t>(peer.value)]; }
  Peer& at(Rank peer) { return peers_[static_cast<std::size_t>(peer.value)]; }
  bool is_behind(const Progress& theirs, WaitKind kind) const;
  bool is_waiting() const;
  std::string describe(const Wait& wait, WaitKind kind) const;
  std::string describe_peers(WaitKind kind) const;

  const Rank self_;
  const Limits limits_;
  Progress own_;
  std::vector<Peer> peers_;
  std::array<Wait, 2> waits_;
  std::vector<std::string> pending_;  // notices of waits that have ended
};

}  // namespace zensync::driver
