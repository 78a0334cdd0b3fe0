// What all ranks agree to call the fault: the first one that reached the Rendezvous.
// Place: driver, level 4, private to control.cpp. The Rendezvous may be on a host that is gone, and
// its calls cannot be cancelled: so each is made on a thread of its own, which shares the board and
// outlives its owner if it must.
// Threads: any. Never fails: where the Rendezvous does, the fault that was first known here stays.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "zensync/base/result.hpp"
#include "zensync/driver/rendezvous.hpp"

namespace zensync::driver {

class FaultBoard : public std::enable_shared_from_this<FaultBoard> {
 public:
  FaultBoard(std::shared_ptr<Rendezvous> rendezvous, std::string key)
      : rendezvous_(std::move(rendezvous)), key_(std::move(key)) {}

  /// Whether `why` is the first fault here. If so it goes to the Rendezvous, and `settled` is
  /// called with what holds there, from another thread, unless `leave` came first.
  bool post(const Error& why, std::function<void(const Error&)> settled);
  /// The fault; until `limit` after it was posted, waits for it to be settled. ok if there is none.
  Status wait(std::chrono::milliseconds limit);
  /// The fault as it is known now. ok if there is none.
  Status fault() const;
  /// The fault, after waiting at most `limit` for one to be posted. ok if there is none.
  Status await(std::chrono::milliseconds limit);
  /// No call of `settled` begins after this. Waits at most `limit` for the call to the Rendezvous,
  /// which may be into an interpreter that is about to end.
  void leave(std::chrono::milliseconds limit);

 private:
  void settle(const Error& own);

  const std::shared_ptr<Rendezvous> rendezvous_;
  const std::string key_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Error> fault_;
  std::chrono::steady_clock::time_point posted_;
  bool is_settled_ = false;
  std::function<void(const Error&)> settled_;
};

}  // namespace zensync::driver
