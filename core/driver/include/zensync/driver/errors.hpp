// What all drivers do alike, wherever they live: the check of an Exchange and the wording of
// errors.
// Place: driver, level 4. The binding's torch driver, which is not in this module, needs it too.
// Owner: pure functions that hold nothing. Threads: callable from any.
// Failures: none of their own; every error made here carries `self` as the rank that saw it and
// the peer as the culprit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zensync/base/result.hpp"
#include "zensync/scheme/exchange.hpp"

namespace zensync::driver {

/// kInvalid when a peer is this rank or no rank at all, a Recv has no Buffer, or a message is too
/// long.
Status check_exchange(const Exchange& exchange, Rank self, int size);

/// kDeadline; `delivering` have not sent what is awaited, `taking` have not read what was sent.
Error deadline_error(Rank self, const std::vector<int>& delivering, const std::vector<int>& taking);

Error lost_error(Rank self, Rank peer, const std::string& how);

Error too_long_error(Rank self, Rank peer, std::uint64_t length_bytes,
                     std::uint64_t capacity_bytes);

/// `why`, with `self` as its rank when it names none.
Error reported_by(Rank self, Error why);

}  // namespace zensync::driver
