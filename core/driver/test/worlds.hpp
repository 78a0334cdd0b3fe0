// Worlds of drivers for tests: n ranks of one kind, each run by a thread.
// Place: tests of driver. A World owns its drivers and, for the mesh, a temporary folder. A new
// kind of driver joins the contract suite by one line in `all_kinds`.
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "zensync/driver/counting.hpp"
#include "zensync/driver/faulty.hpp"
#include "zensync/driver/loopback.hpp"
#include "zensync/driver/native_mesh.hpp"
#include "zensync/driver/simulated.hpp"
#include "zensync/driver/tracing.hpp"

namespace zensync::test {

using namespace std::chrono_literals;  // NOLINT(google-build-using-namespace): tests only

using Drivers = std::vector<std::unique_ptr<Driver>>;

/// A folder that goes away with this object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    static std::atomic<int> counter{0};
    const auto stamp = Clock::now().time_since_epoch().count();
    path_ = std::filesystem::temp_directory_path() /
            ("zensync-driver-" + std::to_string(stamp) + "-" + std::to_string(counter++));
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// Runs `body(rank)` on one thread per rank and waits for all.
inline void on_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back([&body, rank] { body(rank); });
  for (auto& thread : threads) thread.join();
}

inline NativeMeshOptions mesh_options(int rank, int size) {
  NativeMeshOptions options;
  options.rank = Rank{rank};
  options.size = size;
  options.name = "mesh";
  options.settings = "codec=auto";
  options.timeout = 20s;
  return options;
}

/// n ranks of a native mesh over 127.0.0.1; empty pointers where opening failed.
inline Drivers make_native(int size) {
  const TemporaryFolder folder;
  Drivers drivers(static_cast<std::size_t>(size));
  on_ranks(size, [&](int rank) {
    auto rendezvous = make_file_rendezvous(folder.path());
    auto driver = open_native_mesh(mesh_options(rank, size), *rendezvous);
    if (driver.ok()) drivers[static_cast<std::size_t>(rank)] = std::move(driver.value());
  });
  return drivers;
}

/// Puts a decorator round each driver of a world.
template <class Decorate>
Drivers decorated(Drivers drivers, Decorate decorate) {
  for (auto& driver : drivers) {
    if (driver) driver = decorate(std::move(driver));
  }
  return drivers;
}

inline std::unique_ptr<Driver> without_faults(std::unique_ptr<Driver> driver) {
  return make_faulty(std::move(driver), FaultPlan());
}

struct Kind {
  std::string name;
  std::function<Drivers(int)> make;
  bool is_virtual = false;  ///< sleeping does not move its clock
};

inline std::vector<Kind> all_kinds() {
  const auto loopback = [](int size) { return make_loopback(size); };
  const auto tracing = [](std::unique_ptr<Driver> driver) {
    return make_tracing(std::move(driver), std::make_shared<Trace>());
  };
  return {{"loopback", loopback},
          {"counting", [=](int size) { return decorated(loopback(size), make_counting); }},
          {"tracing", [=](int size) { return decorated(loopback(size), tracing); }},
          {"faulty", [=](int size) { return decorated(loopback(size), without_faults); }},
          {"simulated", [](int size) { return make_simulated(size).drivers; }, true},
          {"native", make_native},
          {"faulty_native", [](int size) { return decorated(make_native(size), without_faults); }}};
}

/// For GoogleTest: names a test after the kind of driver that it runs on.
template <class Info>
std::string name_of_kind(const Info& tested) {
  return tested.param.name;
}

inline Clock::time_point soon(std::chrono::milliseconds wait = 20s) { return Clock::now() + wait; }

}  // namespace zensync::test
