// What ranks of a native mesh tell each other through the Rendezvous: address, host, settings,
// token. Place: driver, level 4, private. Blocking calls on the caller's thread; owns nothing.
// Keys: NAME/token and NAME/rank/R. A record is lines of text; the settings come last, so they may
// hold any text. All ranks compare everybody with rank 0 and so report the same mismatch with both
// texts. Fails with kDeadline, kMismatch, kCorruptMessage (a record that is none) and the
// Rendezvous' errors.
#include "mesh_records.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <random>

#include "common.hpp"
#include "zensync/base/hash.hpp"

namespace zensync::driver {
namespace {

constexpr char kHex[] = "0123456789abcdef";
constexpr std::size_t kLines = 5;  // format, address, port, host id, settings

std::string key_of_rank(const NativeMeshOptions& options, int rank) {
  return options.name + "/rank/" + std::to_string(rank);
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::string format_text(int size) {
  return "zensync mesh version " + std::to_string(kWireVersion) + ", " + native_endianness() +
         "-endian, n = " + std::to_string(size);
}

Token draw_token() {
  std::random_device source;  // the system's generator on every platform we build for
  Token token;
  for (std::byte& b : token) b = static_cast<std::byte>(source() & 255U);
  return token;
}

Error mismatch(Rank rank, const std::string& what, const std::string& theirs,
               const std::string& first) {
  return make_error(ErrorKind::kMismatch,
                    what + " differ: rank " + std::to_string(rank.value) + " has \"" + theirs +
                        "\", rank 0 has \"" + first + "\"",
                    rank);
}

Status compare(const MeshRecord& record, const MeshRecord& first, Rank rank) {
  if (record.format != first.format) {
    return mismatch(rank, "mesh formats", record.format, first.format);
  }
  if (record.settings != first.settings) {
    return mismatch(rank, "settings", record.settings, first.settings);
  }
  return {};
}

/// Replaces "nobody set this key" by the names of all ranks that are not there.
Error absent(const NativeMeshOptions& options, Rendezvous& rendezvous, const Error& from_store) {
  if (from_store.kind != ErrorKind::kDeadline) return from_store;
  std::vector<int> missing;
  for (int rank = 0; rank < options.size; ++rank) {
    auto text = rendezvous.get(key_of_rank(options, rank));
    if (text.ok() && text.value().empty()) missing.push_back(rank);
  }
  if (missing.empty()) return from_store;
  return make_error(ErrorKind::kDeadline,
                    list_ranks(missing) + " did not come to mesh '" + options.name + "' within " +
                        std::to_string(options.timeout.count()) + " ms",
                    Rank{missing.front()});
}

std::string key_of_token(const NativeMeshOptions& options) { return options.name + "/token"; }

Status publish_token(const NativeMeshOptions& options, Rendezvous& rendezvous, Token& token) {
  token = draw_token();
  return rendezvous.set(key_of_token(options), token_text(token));
}

Status await_token(const NativeMeshOptions& options, Rendezvous& rendezvous,
                   Clock::time_point deadline, Token& token) {
  if (options.rank.value == 0) return {};
  const std::string key = key_of_token(options);
  auto text = rendezvous.wait(key, left_until(deadline));
  if (!text.ok()) return absent(options, rendezvous, text.error());
  if (parse_token(text.value(), token)) return {};
  return make_error(ErrorKind::kCorruptMessage, "the token under '" + key + "' is none", Rank{0});
}

}  // namespace

std::string record_text(const MeshRecord& record) {
  return record.format + '\n' + record.address + '\n' + std::to_string(record.port) + '\n' +
         record.host_id + '\n' + record.settings;
}

Result<MeshRecord> parse_record(const std::string& text, Rank rank) {
  std::string lines[kLines];
  std::size_t at = 0;
  bool good = true;
  for (std::size_t i = 0; i < kLines; ++i) {
    const std::size_t end = i + 1 < kLines ? text.find('\n', at) : text.size();
    good = good && end != std::string::npos;
    if (!good) break;
    lines[i] = text.substr(at, end - at);
    at = end + 1;
  }
  MeshRecord record{lines[0], lines[1], 0, lines[3], lines[4]};
  const char* end = lines[2].data() + lines[2].size();
  const auto parsed = std::from_chars(lines[2].data(), end, record.port);
  if (!good || parsed.ec != std::errc() || parsed.ptr != end) {
    return make_error(
        ErrorKind::kCorruptMessage,
        "what rank " + std::to_string(rank.value) + " published is no record of a mesh", rank);
  }
  return record;
}

std::string token_text(const Token& token) {
  std::string text;
  for (const std::byte b : token) {
    text += kHex[std::to_integer<unsigned>(b) >> 4];
    text += kHex[std::to_integer<unsigned>(b) & 15];
  }
  return text;
}

bool parse_token(const std::string& text, Token& token) {
  if (text.size() != 2 * kTokenBytes) return false;
  for (std::size_t i = 0; i < kTokenBytes; ++i) {
    unsigned value = 0;
    const char* at = text.data() + 2 * i;
    if (std::from_chars(at, at + 2, value, 16).ptr != at + 2) return false;
    token[i] = static_cast<std::byte>(value);
  }
  return true;
}

std::chrono::milliseconds left_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  return std::max(left, std::chrono::milliseconds{0});
}

Result<MeshRecords> exchange_records(const NativeMeshOptions& options, std::uint16_t port,
                                     Rendezvous& rendezvous, Clock::time_point deadline) {
  const std::string host_id = options.host_id.empty() ? default_host_id() : options.host_id;
  const MeshRecord own{format_text(options.size), options.address, port, one_line(host_id),
                       options.settings};
  MeshRecords all;
  // The token before the record: whoever has published itself is not waited for any more.
  Status status;
  if (options.rank.value == 0) status = publish_token(options, rendezvous, all.token);
  if (status.ok()) {
    status = rendezvous.set(key_of_rank(options, options.rank.value), record_text(own));
  }
  if (status.ok()) status = await_token(options, rendezvous, deadline, all.token);
  if (!status.ok()) return status.error();
  for (int rank = 0; rank < options.size; ++rank) {
    auto text = rendezvous.wait(key_of_rank(options, rank), left_until(deadline));
    if (!text.ok()) return absent(options, rendezvous, text.error());
    auto record = parse_record(text.value(), Rank{rank});
    if (!record.ok()) return record.error();
    all.ranks.push_back(std::move(record.value()));
    status = compare(all.ranks.back(), all.ranks.front(), Rank{rank});
    // A rank that differs from rank 0 need not wait for the others (with another n: may never see
    // them).
    if (status.ok() && rank == 0) status = compare(own, all.ranks.front(), options.rank);
    if (!status.ok()) return status.error();
  }
  return all;
}

std::uint64_t settings_digest(const MeshRecord& record) {
  const std::string text = record.format + '\n' + record.settings;
  return digest64(text.data(), text.size());
}

std::uint64_t host_digest(const MeshRecord& record) {
  return digest64(record.host_id.data(), record.host_id.size());
}

Topology topology_of(const std::vector<MeshRecord>& ranks) {
  Topology topology;
  std::vector<std::string> hosts;
  std::vector<int> ranks_of_host;
  for (const MeshRecord& record : ranks) {
    const auto found = std::find(hosts.begin(), hosts.end(), record.host_id);
    const auto host = static_cast<std::size_t>(found - hosts.begin());
    if (found == hosts.end()) {
      hosts.push_back(record.host_id);
      ranks_of_host.push_back(0);
    }
    topology.places.push_back({static_cast<int>(host), ranks_of_host[host]++});
  }
  return topology;
}

std::string default_host_id() {
  std::string boot_id;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  struct stat name_space {};
  if (std::getline(file, boot_id) && ::stat("/proc/self/ns/net", &name_space) == 0) {
    return boot_id + "/" + std::to_string(name_space.st_ino);
  }
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) == 0 && name[0] != '\0') return name;
  return "host";
}

}  // namespace zensync::driver
