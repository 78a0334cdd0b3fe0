// What ranks of a native mesh tell each other through the Rendezvous before they connect.
// Place: driver, level 4, private. Blocking calls on the caller's thread; values only, nothing is
// kept. Fails with kDeadline (names the ranks that did not come), kMismatch (both texts) and
// whatever the Rendezvous itself reports.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "wire.hpp"
#include "zensync/driver/native_mesh.hpp"

namespace zensync::driver {

/// One rank as it published itself.
struct MeshRecord {
  std::string format;  ///< version, endianness and n, as text
  std::string address;
  std::uint16_t port = 0;
  std::string host_id;
  std::string settings;
};

struct MeshRecords {
  Token token{};
  std::vector<MeshRecord> ranks;
};

/// Publishes this rank (and, on rank 0, a fresh token), waits for all others and compares them.
Result<MeshRecords> exchange_records(const NativeMeshOptions& options, std::uint16_t port,
                                     Rendezvous& rendezvous, Clock::time_point deadline);

/// A record as it is published, and back. `rank` is whose it is, for the error (kCorruptMessage).
std::string record_text(const MeshRecord& record);
Result<MeshRecord> parse_record(const std::string& text, Rank rank);

/// A token as hexadecimal digits, and back; false if `text` is none.
std::string token_text(const Token& token);
bool parse_token(const std::string& text, Token& token);

/// Digest of all that must be equal on every rank.
std::uint64_t settings_digest(const MeshRecord& record);
std::uint64_t host_digest(const MeshRecord& record);

/// Hosts numbered in the order in which their first rank comes.
Topology topology_of(const std::vector<MeshRecord>& ranks);

/// Text that is equal on ranks that share a host's kernel and its network: (boot id, network
/// namespace).
std::string default_host_id();

/// Time left until `deadline` in whole milliseconds, never negative.
std::chrono::milliseconds left_until(Clock::time_point deadline);

}  // namespace zensync::driver
