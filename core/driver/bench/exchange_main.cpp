// exchange_main RANKS BYTES ITERATIONS [threads|processes] [native|loopback]
// Times exchanges between ranks on this machine and prints rank 0's figures; a tool for work on
// drivers. Place: a surface, so it may print. Ranks are processes (default) or threads; they meet
// over 127.0.0.1 through files in a temporary folder, which it removes.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>

#include "exchange_bench.hpp"
#include "zensync/driver/loopback.hpp"
#include "zensync/driver/native_mesh.hpp"

namespace {

using namespace zensync;  // NOLINT(google-build-using-namespace): a program, not a header

int report(Driver& driver, const ExchangeBenchOptions& options) {
  auto result = bench_exchange(driver, options);
  if (!result.ok()) {
    std::fprintf(stderr, "rank %d: %s\n", driver.rank().value, result.error().message.c_str());
    return 1;
  }
  if (driver.rank().value != 0) return 0;
  std::vector<double>& seconds = result.value();
  double sum = 0;
  for (const double s : seconds) sum += s;
  std::sort(seconds.begin(), seconds.end());
  const auto at = [&](double share) {
    return 1e3 * seconds[static_cast<std::size_t>(share * double(seconds.size() - 1))];
  };
  std::printf("%s, %d ranks, %llu bytes to each peer: median %.3f ms, mean %.3f, p99 %.3f\n",
              driver.name().c_str(), driver.size(), (unsigned long long)options.message_bytes,
              at(0.5), 1e3 * sum / double(seconds.size()), at(0.99));
  return 0;
}

int run_native(int rank, int size, const std::string& folder, const ExchangeBenchOptions& options) {
  auto rendezvous = make_file_rendezvous(folder);
  NativeMeshOptions mesh;
  mesh.rank = Rank{rank};
  mesh.size = size;
  mesh.name = "bench";
  auto driver = open_native_mesh(mesh, *rendezvous);
  if (!driver.ok()) {
    std::fprintf(stderr, "rank %d: %s\n", rank, driver.error().message.c_str());
    return 1;
  }
  return report(*driver.value(), options);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "RANKS BYTES ITERATIONS [threads|processes] [native|loopback]\n");
    return 2;
  }
  const int size = std::atoi(argv[1]);
  ExchangeBenchOptions options;
  options.message_bytes = std::strtoull(argv[2], nullptr, 10);
  options.iterations = std::max(1, std::atoi(argv[3]));
  const bool threads = argc > 4 && std::string(argv[4]) == "threads";
  std::vector<std::thread> ranks;
  if (argc > 5 && std::string(argv[5]) == "loopback") {
    auto drivers = make_loopback(size);
    for (auto& driver : drivers) ranks.emplace_back([&] { report(*driver, options); });
    for (auto& rank : ranks) rank.join();
    return 0;
  }
  std::string folder = std::filesystem::temp_directory_path() / "zensync-bench-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) return 1;
  int failures = 0;
  for (int rank = 0; rank < size; ++rank) {
    if (threads) {
      ranks.emplace_back([&, rank] { run_native(rank, size, folder, options); });
    } else if (fork() == 0) {
      std::exit(run_native(rank, size, folder, options));
    }
  }
  for (auto& rank : ranks) rank.join();
  for (int status = 0; !threads && wait(&status) > 0;) failures += status != 0;
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return failures != 0;
}
