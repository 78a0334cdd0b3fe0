// A warm exchange of the native mesh allocates nothing.
// Place: tests of driver. Replaces the global operator new of the test program by one that counts
// per thread; the count is read by the thread that runs a rank. Not inlined: GCC would warn of a
// mismatch that is none.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "messages.hpp"
#include "worlds.hpp"

namespace {
thread_local std::uint64_t allocations = 0;
}  // namespace

[[gnu::noinline]] void* operator new(std::size_t size_bytes) {
  ++allocations;
  void* memory = std::malloc(size_bytes == 0 ? 1 : size_bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace zensync::test {
namespace {

TEST(Allocation, AWarmExchangeAllocatesNothing) {
  constexpr int kSize = 3;
  Drivers drivers = make_native(kSize);
  on_ranks(kSize, [&](int rank) {
    Driver& driver = *drivers[static_cast<std::size_t>(rank)];
    const auto message = message_of(1, 300000);  // more than the system takes at once
    std::vector<Buffer> in(2);
    Exchange exchange;
    for (int shift = 1; shift < kSize; ++shift) {
      exchange.sends.push_back({Rank{(rank + shift) % kSize}, message});
      exchange.recvs.push_back({Rank{(rank + kSize - shift) % kSize}, 1 << 20,
                                &in[static_cast<std::size_t>(shift - 1)]});
    }
    std::uint64_t before = 0;
    for (int round = 0; round < 60; ++round) {
      if (round == 20) before = allocations;
      ASSERT_TRUE(driver.exchange(exchange, soon()).ok());
    }
    const std::uint64_t during = allocations - before;
    EXPECT_GT(allocations, 0U);  // the counter counts
    EXPECT_EQ(during, 0U);
    EXPECT_TRUE(driver.flush(soon()).ok());
  });
}

}  // namespace
}  // namespace zensync::test
