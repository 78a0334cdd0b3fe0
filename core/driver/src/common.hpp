// What the drivers of this module share beyond driver/errors.hpp: the bound of a frame and lists of
// ranks in texts. Place: driver, level 4, private. Pure; callable from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zensync/driver/errors.hpp"

namespace zensync::driver {

/// The longest message that a frame can announce: 48 bits.
inline constexpr std::uint64_t kMaxMessageBytes = (std::uint64_t{1} << 48) - 1;

/// "rank 3", "ranks 1, 4, 5"; sorts and drops duplicates.
std::string list_ranks(std::vector<int> ranks);

}  // namespace zensync::driver
