// Which local address peers should use: that of a named interface, or the one that reaches a host.
// Place: driver, level 4. Asks the system only; no packet leaves (connecting a UDP socket merely
// picks a route). Called at start, on the caller's thread; blocks while a name is resolved. Fails
// with kUnsupported: no such interface, no address on it, unknown host, no route.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <system_error>

#include "zensync/driver/native_mesh.hpp"

namespace zensync {
namespace {

Error unusable(const std::string& what, const std::string& why) {
  return make_error(ErrorKind::kUnsupported, what + ": " + why);
}

std::string text_of(int number) {
  return std::error_code(number, std::generic_category()).message();
}

/// Numeric text of an address; link-local IPv6 ones with their interface. Empty on failure.
std::string numeric(const sockaddr* address, socklen_t size_bytes) {
  char text[NI_MAXHOST] = {};
  if (::getnameinfo(address, size_bytes, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) {
    return {};
  }
  return text;
}

Result<std::string> address_of_interface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return unusable("cannot list interfaces", text_of(errno));
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  bool known = false;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
      if (name != one->ifa_name) continue;
      known = true;
      if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != family) continue;
      const socklen_t size_bytes = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      std::string text = numeric(one->ifa_addr, size_bytes);
      if (!text.empty()) return text;
    }
  }
  return unusable("interface '" + name + "'", known ? "it has no IP address" : "there is none");
}

Result<std::string> address_on_route(const addrinfo& target) {
  const int handle = ::socket(target.ai_family, SOCK_DGRAM, 0);
  if (handle < 0) return unusable("cannot make a socket", text_of(errno));
  sockaddr_storage local{};
  socklen_t size_bytes = sizeof local;
  const bool done = ::connect(handle, target.ai_addr, target.ai_addrlen) == 0 &&
                    ::getsockname(handle, reinterpret_cast<sockaddr*>(&local), &size_bytes) == 0;
  const int number = errno;
  ::close(handle);
  if (!done) return unusable("no route", text_of(number));
  std::string text = numeric(reinterpret_cast<const sockaddr*>(&local), size_bytes);
  if (text.empty()) return unusable("no route", "the local address has no numeric form");
  return text;
}

}  // namespace

Result<std::string> address_towards(const std::string& host, int port,
                                    const std::string& interface_name) {
  if (!interface_name.empty()) return address_of_interface(interface_name);
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* list = nullptr;
  const std::string service = std::to_string(port);
  const int failed = ::getaddrinfo(host.c_str(), service.c_str(), &hints, &list);
  if (failed != 0) return unusable("host '" + host + "'", ::gai_strerror(failed));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, ::freeaddrinfo);
  Result<std::string> result = unusable("host '" + host + "'", "it has no address");
  for (const addrinfo* one = list; one != nullptr; one = one->ai_next) {
    result = address_on_route(*one);
    if (result.ok()) return result;
  }
  return unusable("host '" + host + "'", result.error().message);
}

}  // namespace zensync
