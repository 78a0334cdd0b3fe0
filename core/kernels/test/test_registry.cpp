// The choice of a table: best first, by name, by ZENSYNC_CPU_TARGET (in a process of its own,
// because the environment is read once), and an error that lists what is usable.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <set>

#include "data.hpp"

namespace zensync::kernels::test {
namespace {

TEST(Registry, RefIsLastAndNamesAreDistinct) {
  const auto tables = available();
  ASSERT_FALSE(tables.empty());
  EXPECT_EQ(tables.back()->name, "ref");
  std::set<std::string_view> names;
  for (const Table* table : tables) EXPECT_TRUE(names.insert(table->name).second) << table->name;
}

TEST(Registry, EveryEntryIsSet) {
  for (const Table* table : available()) {
    EXPECT_NE(table->find_units, nullptr);
    EXPECT_NE(table->count_nonzero, nullptr);
    EXPECT_NE(table->add_units, nullptr);
    EXPECT_NE(table->finish, nullptr);
    EXPECT_NE(table->gather, nullptr);
    EXPECT_NE(table->scatter, nullptr);
    EXPECT_NE(table->pack_bitmap, nullptr);
    EXPECT_NE(table->unpack_bitmap, nullptr);
    EXPECT_NE(table->pack_elias_fano, nullptr);
    EXPECT_NE(table->unpack_elias_fano, nullptr);
  }
}

TEST(Registry, SelectByName) {
  for (const Table* table : available()) {
    const auto chosen = select(table->name);
    ASSERT_TRUE(chosen.ok());
    EXPECT_EQ(chosen.value(), table);
  }
  EXPECT_EQ(select("").value(), available().front());
}

TEST(Registry, UnknownNameListsTheUsable) {
  for (std::string_view name : {"pentium", "AVX2", "emu128", "ref "}) {
    const auto chosen = select(name);
    ASSERT_FALSE(chosen.ok()) << name;
    EXPECT_EQ(chosen.error().kind, ErrorKind::kUnsupported);
    EXPECT_NE(chosen.error().message.find(std::string(name)), std::string::npos);
    for (const Table* table : available()) {
      EXPECT_NE(chosen.error().message.find(table->name), std::string::npos) << table->name;
    }
  }
}

/// active().name in a new image of this program, with ZENSYNC_CPU_TARGET set.
std::string active_with(const std::string& target) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    setenv("ZENSYNC_CPU_TARGET", target.c_str(), 1);
    setenv("ZENSYNC_TEST_PRINT_ACTIVE", std::to_string(ends[1]).c_str(), 1);
    execl("/proc/self/exe", "test_kernels", "--gtest_filter=Registry.PrintActive",
          static_cast<char*>(nullptr));
    _exit(1);
  }
  close(ends[1]);
  char text[64] = {};
  const ssize_t got = read(ends[0], text, sizeof(text) - 1);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return {text, static_cast<std::size_t>(got < 0 ? 0 : got)};
}

/// Not a test of its own: the half of `EnvironmentForces` that runs in the new process.
TEST(Registry, PrintActive) {
  const char* descriptor = std::getenv("ZENSYNC_TEST_PRINT_ACTIVE");
  if (descriptor == nullptr) GTEST_SKIP() << "run by EnvironmentForces";
  const std::string name(active().name);
  EXPECT_EQ(write(std::atoi(descriptor), name.data(), name.size()),
            static_cast<ssize_t>(name.size()));
}

TEST(Registry, EnvironmentForces) {
  for (const Table* table : available()) {
    EXPECT_EQ(active_with(std::string(table->name)), table->name);
  }
  EXPECT_EQ(active_with(""), available().front()->name);
  EXPECT_EQ(active_with("pentium"), "ref");
}

}  // namespace
}  // namespace zensync::kernels::test
