// A decorator that counts, from the outside, what passes through a driver.
// Place: driver, level 4; for tests and `zensync bench --bytes`.
// It counts by the messages it sees, not by what the inner driver says, so it checks `wire_count`
// too. Receives count when their exchange has succeeded.
// Owns the inner driver; same thread rules, same errors as the inner driver.
#pragma once

#include <memory>

#include "zensync/driver/driver.hpp"

namespace zensync {

std::unique_ptr<Driver> make_counting(std::unique_ptr<Driver> inner);

}  // namespace zensync
