// The native mesh: a full mesh of TCP connections between n ranks, over standalone Asio.
// Place: driver, level 4. No thread of its own: connections make progress inside `exchange` and
// `flush`, on the calling thread (docs/adr/0001).
// Start: each rank listens on an ephemeral port of the chosen interface, publishes its address,
// host and settings through the Rendezvous, connects to all lower ranks and accepts all higher
// ones. A handshake (docs/wire_format.md) checks a token, drawn by rank 0 and published through the
// Rendezvous, and a digest of version, endianness, n and every setting that touches the wire; a
// stranger is refused and start-up goes on.
// Owner: the driver owns its sockets; the Rendezvous is used while it opens only. Its end
// says goodbye, or tells the peers the error it died of.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "zensync/driver/driver.hpp"
#include "zensync/driver/rendezvous.hpp"

namespace zensync {

struct NativeMeshOptions {
  Rank rank;
  int size = 0;
  /// Prefix of all rendezvous keys of this mesh; each mesh of a job has its own.
  std::string name;
  /// Numeric address to bind and publish; see `address_towards`.
  std::string address = "127.0.0.1";
  /// Settings that every rank must share, as text; a difference is kMismatch and names both texts.
  std::string settings;
  /// Host of this rank as a text equal on ranks that share a host; empty: (boot id, network
  /// namespace).
  std::string host_id;
  std::chrono::milliseconds timeout{60000};
  /// For the connections alone, once all ranks have published themselves: what is not reachable
  /// then never will be (kUnsupported).
  std::chrono::milliseconds connect_timeout{60000};
};

/// Opens the mesh; a collective call of all ranks. Errors: kDeadline (names the ranks that did not
/// come), kMismatch (settings), kUnsupported (an address is not usable, or not reachable).
Result<std::unique_ptr<Driver>> open_native_mesh(const NativeMeshOptions& options,
                                                 Rendezvous& rendezvous);

/// The numeric local address that reaches `host`:`port` (no packet is sent), or, when
/// `interface_name` is not empty, that interface's first address (IPv4 before IPv6).
Result<std::string> address_towards(const std::string& host, int port,
                                    const std::string& interface_name);

}  // namespace zensync
