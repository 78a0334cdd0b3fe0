// Which table of kernels is in use: the best that the processor runs, or the one that was named.
// Place: kernels. The choice is made at run time, once; ZENSYNC_CPU_TARGET reaches it through
// base/env. Tables are constants; nothing is owned here. An unknown name is an error, never a
// silent fallback: `active` has no way to report one, so whoever starts the library calls `select`
// first.
#include <string>

#include "tables.hpp"
#include "zensync/base/env.hpp"

namespace zensync::kernels {
namespace {

std::vector<const Table*> all_tables() {
  std::vector<const Table*> tables = simd_tables();
  tables.push_back(&kRefTable);
  return tables;
}

}  // namespace

std::vector<const Table*> available() {
  static const std::vector<const Table*> cached = all_tables();
  return cached;
}

Result<const Table*> select(std::string_view name) {
  const std::vector<const Table*> tables = available();
  if (name.empty()) return tables.front();
  std::string names;
  for (const Table* table : tables) {
    if (table->name == name) return table;
    names += (names.empty() ? "" : ", ") + std::string(table->name);
  }
  return make_error(ErrorKind::kUnsupported, "no kernels for CPU target \"" + std::string(name) +
                                                 "\" here (ZENSYNC_CPU_TARGET); usable: " + names);
}

const Table& active() {
  static const Table* const table = [] {
    const Result<const Table*> chosen = select(env().cpu_target);
    return chosen.ok() ? chosen.value() : &kRefTable;
  }();
  return *table;
}

}  // namespace zensync::kernels
