// Clears DAZ and FTZ (and their like) for a scope, so that denormals are added exactly whatever the
// process has set (`torch.set_flush_denormal`).
// Place: base, level 0; held by the engine's thread while a job runs, and by the kernels that add.
// Threads: the flags are those of the calling thread; the scope must end on the thread it began on.
// Scopes nest: each puts back what it found. Owns nothing; cannot fail.
// On processors other than x86-64 and AArch64 it does nothing.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zensync {

class ScopedExactFloats {
 public:
  ScopedExactFloats(const ScopedExactFloats&) = delete;
  ScopedExactFloats& operator=(const ScopedExactFloats&) = delete;
#if defined(__x86_64__)
  ScopedExactFloats() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlushBits); }
  ~ScopedExactFloats() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlushBits = 0x8040;  // FTZ is bit 15, DAZ bit 6
  unsigned saved_;
#elif defined(__aarch64__)
  ScopedExactFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~kFlushBits));
  }
  ~ScopedExactFloats() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  static constexpr std::uint64_t kFlushBits = (1ULL << 24) | (1ULL << 19);  // FZ, FZ16
  std::uint64_t saved_ = 0;
#else
  ScopedExactFloats() {}
  ~ScopedExactFloats() {}
#endif
};

}  // namespace zensync
