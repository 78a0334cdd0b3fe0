// The fault that all ranks name; see fault_board.hpp. Place: driver, level 4, private.
// A fault is kept in the Rendezvous as the payload of an abort frame: one encoding, one decoder.
#include "fault_board.hpp"

#include <span>
#include <thread>

#include "wire.hpp"
#include "zensync/base/blocked_signals.hpp"

namespace zensync::driver {
namespace {

std::string to_text(const Error& error) {
  const std::vector<std::byte> frame = encode_abort(error);
  return {reinterpret_cast<const char*>(frame.data()) + kPrefixBytes, frame.size() - kPrefixBytes};
}

std::optional<Error> from_text(const std::string& text) {
  return decode_abort(std::as_bytes(std::span(text.data(), text.size())));
}

}  // namespace

bool FaultBoard::post(const Error& why, std::function<void(const Error&)> settled) {
  {
    const std::lock_guard lock(mutex_);
    if (fault_) return false;
    fault_ = why;
    posted_ = std::chrono::steady_clock::now();
    settled_ = std::move(settled);
    changed_.notify_all();
  }
  try {
    const BlockedSignals blocked;
    std::thread([board = shared_from_this(), why] { board->settle(why); }).detach();
  } catch (const std::exception&) {  // no thread to be had: this rank's own word must do
    const std::lock_guard lock(mutex_);
    is_settled_ = true;
    changed_.notify_all();
  }
  return true;
}

void FaultBoard::settle(const Error& own) {
  Error truth = own;
  try {
    auto text = rendezvous_->compare_set(key_, "", to_text(own));
    if (text.ok()) {
      if (auto first = from_text(text.value())) truth = std::move(*first);
    }
  } catch (const std::exception&) {  // no memory: this rank's own word must do
  }
  const std::lock_guard lock(mutex_);
  is_settled_ = true;
  changed_.notify_all();
  try {
    fault_ = truth;
    if (settled_) settled_(truth);
  } catch (const std::exception&) {  // no memory: whoever asks by `wait` gets what there is
  }
  settled_ = nullptr;
}

Status FaultBoard::await(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [this] { return fault_.has_value(); });
  if (fault_) return *fault_;
  return {};
}

Status FaultBoard::wait(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  if (!fault_) return {};
  changed_.wait_until(lock, posted_ + limit, [this] { return is_settled_; });
  return *fault_;
}

Status FaultBoard::fault() const {
  const std::lock_guard lock(mutex_);
  if (fault_) return *fault_;
  return {};
}

void FaultBoard::leave(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  settled_ = nullptr;
  if (fault_) changed_.wait_for(lock, limit, [this] { return is_settled_; });
}

}  // namespace zensync::driver
