// Keeps signals away from the library's own threads.
// Place: base, level 0. A thread inherits the mask of the one that starts it, so a guard around the
// start is enough: signals then go to the program's threads, whose waits they must interrupt
// (Ctrl-C in Python).
// Owner: restores the caller's mask at its end. Per thread; nothing can fail.
#pragma once

#include <csignal>

namespace zensync {

class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace zensync
