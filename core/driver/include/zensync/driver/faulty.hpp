// A decorator that does wrong what it is told to: delays, damages, repeats, swaps or drops what one
// rank sends, or lets the rank die; and the plan that says so, as data and as text.
// Place: driver, level 4; for tests.
// Owner: it owns the inner driver, and copies of the messages that it changes, for as long as
// scheme/exchange.hpp demands. What this rank receives is never touched.
// Threads: those of the inner driver. The functions of a plan are called on the driver's thread.
// Fails as the inner driver does; after `die` with kPeerLost, naming this rank. `parse_faults`
// fails with kInvalid and says which fault and which word is wrong.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zensync/driver/driver.hpp"

namespace zensync {

enum class FaultKind {
  kDelay,      ///< waits before the exchange
  kTruncate,   ///< a message is sent without its last bytes
  kCorrupt,    ///< one byte of a message is changed
  kDuplicate,  ///< a message is sent twice
  kReorder,    ///< two successive messages to one peer are swapped, see below
  kDrop,       ///< a message is not sent
  kDie,        ///< the rank dies
};
inline constexpr int kFaultKinds = 7;

/// One fault of one rank. Where several messages of an exchange go to a matching peer, truncate,
/// corrupt, duplicate and drop act on each of them.
struct Fault {
  FaultKind kind = FaultKind::kDelay;
  int exchange = -1;  ///< number of the exchange of this driver, from 0; −1: every
  Rank peer;          ///< to whom; −1: everybody. Not for delay and die
  std::chrono::milliseconds delay{0};  ///< kDelay; ends at the exchange's deadline if not before
  std::uint64_t bytes = 1;             ///< kTruncate: so many are missing (all, if there are fewer)
  std::uint64_t offset = 0;            ///< kCorrupt: which byte (the last one, if there are fewer)
  std::uint8_t mask = 1;               ///< kCorrupt: bits to flip in it
  bool after = false;                  ///< kDie: when the sends of that exchange have left
  bool signal = false;                 ///< kDie: the whole process, by SIGKILL
};

/// kReorder swaps the first two messages of the exchange to a peer. If there is just one, it waits
/// and goes behind the first message of the next exchange that sends to that peer, or leaves with
/// the flush.
struct FaultPlan {
  std::vector<Fault> faults;
  /// kDie without `signal`: what to do; empty: the inner driver vanishes.
  std::function<void()> die;
  /// Called whenever a fault acts, so that a test can tell that it did; may be empty.
  std::function<void(const Fault&)> acted;
};

std::unique_ptr<Driver> make_faulty(std::unique_ptr<Driver> inner, FaultPlan plan);

/// "delay", "truncate", …; what a plan's text calls it.
const char* fault_name(FaultKind kind);

/// Reads faults divided by ';', each KIND:NAME=VALUE,…, for example
/// "corrupt:exchange=1,peer=2,offset=40,mask=1;die:exchange=3,after=1,how=signal". Names:
///   all: exchange (or "every", as if left out); all but delay and die: peer (or "all");
///   delay: ms (needed); truncate: bytes; corrupt: offset, mask (0x.. too);
///   die: after (0 or 1), how ("vanish", "signal").
/// Spaces around words are ignored; an empty text is a plan without faults.
Result<FaultPlan> parse_faults(const std::string& text);

/// The text that `parse_faults` reads back as the same faults.
std::string faults_text(const std::vector<Fault>& faults);

}  // namespace zensync
