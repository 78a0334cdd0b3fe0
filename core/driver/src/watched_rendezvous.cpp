// A Rendezvous whose waits end with a fault; see control.hpp. Place: driver, level 4.
// Waits are cut into slices, between which the control connections are asked. Owns nothing.
#include <algorithm>

#include "mesh_records.hpp"
#include "zensync/driver/control.hpp"

namespace zensync {
namespace {

constexpr std::chrono::milliseconds kSlice{100};

class WatchedRendezvous final : public Rendezvous {
 public:
  WatchedRendezvous(Rendezvous& inner, const Control& control) : inner_(inner), control_(control) {}

  Status set(const std::string& key, const std::string& value) override {
    return inner_.set(key, value);
  }
  Result<std::string> wait(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto until = Clock::now() + timeout;
    for (;;) {
      if (Status fault = control_.fault(); !fault.ok()) return fault.error();
      const auto left = driver::left_until(until);
      const bool is_last = left <= kSlice;
      auto text = inner_.wait(key, std::min(left, kSlice));
      if (text.ok() || is_last || text.error().kind != ErrorKind::kDeadline) return text;
    }
  }
  Result<std::string> get(const std::string& key) override { return inner_.get(key); }
  Result<std::string> compare_set(const std::string& key, const std::string& expected,
                                  const std::string& desired) override {
    return inner_.compare_set(key, expected, desired);
  }
  Status check() override {
    if (Status fault = control_.fault(); !fault.ok()) return fault;
    return inner_.check();
  }

 private:
  Rendezvous& inner_;
  const Control& control_;
};

}  // namespace

std::unique_ptr<Rendezvous> make_watched_rendezvous(Rendezvous& inner, const Control& control) {
  return std::make_unique<WatchedRendezvous>(inner, control);
}

}  // namespace zensync
