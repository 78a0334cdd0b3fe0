// The timing function works on every driver and reports the driver's errors.
// Place: tests of driver. Says nothing about speed.
#include <gtest/gtest.h>

#include "exchange_bench.hpp"
#include "worlds.hpp"

namespace zensync::test {
namespace {

TEST(ExchangeBench, GivesOneTimePerIteration) {
  for (const Kind& kind : all_kinds()) {
    Drivers drivers = kind.make(3);
    on_ranks(3, [&](int rank) {
      ExchangeBenchOptions options;
      options.iterations = 25;
      const auto result = bench_exchange(*drivers[static_cast<std::size_t>(rank)], options);
      ASSERT_TRUE(result.ok()) << kind.name << ": " << result.error().message;
      ASSERT_EQ(result.value().size(), 25U);
      for (const double seconds : result.value()) EXPECT_GT(seconds, 0.0);
    });
  }
}

TEST(ExchangeBench, ReportsErrors) {
  Drivers drivers = make_loopback(2);
  ExchangeBenchOptions options;
  options.timeout = 20ms;
  const auto result = bench_exchange(*drivers[0], options);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().kind, ErrorKind::kDeadline);
}

}  // namespace
}  // namespace zensync::test
