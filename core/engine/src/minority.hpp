// Who differs from the rest, where ranks disagree about a job. Place: engine, level 5, private.
// Pure; reads the messages of the exchange in which the difference showed.
#pragma once

#include <span>

#include "zensync/base/result.hpp"
#include "zensync/base/types.hpp"
#include "zensync/codec/headers.hpp"
#include "zensync/scheme/exchange.hpp"

namespace zensync {

/// What one rank says of a job.
struct Saying {
  Rank rank;
  std::span<const JobHeader> jobs;
};

/// `why` (kMismatch) with the culprit that most ranks would name: of `own` and the ranks whose
/// messages `exchange` holds, the largest group that says the same is taken as right. If this rank
/// is not in it, it is the culprit itself; if the culprit of `why` is in it, the lowest rank that
/// is not. Where no group is the largest (always with two ranks), `why` as it is.
Error blame_minority(Error why, const Exchange& exchange, const Saying& own, bool verify);

}  // namespace zensync
