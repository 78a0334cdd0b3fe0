// The coroutine that a scheme is. It yields a pointer to an Exchange and goes on when that has been
// performed; it ends with a Status.
// Place: scheme, level 3; the engine runs it over a driver, tests feed it by hand.
// Owner: whoever runs it. Its frame holds a small job object and references to context and
// workspace, which must outlive it; the exchange it yields is the workspace's.
// Threads: one at a time, one resume at a time; not bound to one thread.
// A driver's failure is not told to the scheme: whoever runs it destroys the coroutine where it
// stands. std::bad_alloc leaves through `next()`; the task is then only destroyed.
#pragma once

#include <coroutine>
#include <exception>
#include <utility>

#include "zensync/base/result.hpp"
#include "zensync/scheme/exchange.hpp"

namespace zensync {

class SchemeTask {
 public:
  struct promise_type {
    const Exchange* exchange = nullptr;
    Status status;
    SchemeTask get_return_object() {
      return SchemeTask(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    std::suspend_always yield_value(const Exchange* next) noexcept {
      exchange = next;
      return {};
    }
    void return_value(Status result) { status = std::move(result); }
    void unhandled_exception() { throw; }  // std::bad_alloc: the engine turns it into kCapacity
  };

  explicit SchemeTask(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  SchemeTask(SchemeTask&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  SchemeTask& operator=(SchemeTask&&) = delete;
  ~SchemeTask() {
    if (handle_) handle_.destroy();
  }

  /// Runs to the next exchange and returns it, or nullptr when the scheme has ended.
  const Exchange* next() {
    handle_.resume();
    return handle_.done() ? nullptr : handle_.promise().exchange;
  }
  const Status& status() const { return handle_.promise().status; }

 private:
  std::coroutine_handle<promise_type> handle_;
};

}  // namespace zensync
