// Reading the environment: the only place in the core that does. Place: base, level 0.
// The values are read once; a wrong one is refused by whoever uses it.
#include "zensync/base/env.hpp"

#include <cstdlib>

namespace zensync {
namespace {

std::string text_of(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

Env read_env() {
  Env result;
  result.cpu_target = text_of("ZENSYNC_CPU_TARGET");
  result.verify = text_of("ZENSYNC_VERIFY");
  result.disable = text_of("ZENSYNC_DISABLE") == "1";
  result.transport = text_of("ZENSYNC_TRANSPORT");
  result.interface_name = text_of("GLOO_SOCKET_IFNAME");
  return result;
}

}  // namespace

const Env& env() {
  static const Env cached = read_env();
  return cached;
}

}  // namespace zensync
