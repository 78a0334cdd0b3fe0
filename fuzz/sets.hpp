// What every set of units read from bytes must fulfil, and sets to start from. Place: fuzz.
// Values and pure functions; a property that does not hold ends the process (target.hpp).
#pragma once

#include "target.hpp"
#include "zensync/codec/message.hpp"

namespace zensync::fuzz {

/// Blocks ascend, offsets ascend within their block, every slot is below `slots`, counts add up to
/// `units`.
void require_sound(const SparseSet& set, std::uint64_t slots, std::uint64_t units);

/// Both sets hold the same slots.
bool same_slots(const SparseSet& a, const SparseSet& b);

/// Numbers of slots around the edges of blocks and integers; `choice` picks one.
std::uint64_t choose_slots(std::uint8_t choice);
inline constexpr int kSlotChoices = 8;

/// `units` slots below `slots`, ascending, spread by `seed`.
std::vector<std::uint64_t> some_slots(std::uint64_t slots, std::uint64_t units, std::uint64_t seed);

/// The set of `found`, without values.
void fill_set(const std::vector<std::uint64_t>& found, SparseSet& set);

}  // namespace zensync::fuzz
