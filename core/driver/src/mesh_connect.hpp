// Opens the connections of a native mesh: connects to all lower ranks, accepts all higher ones.
// Place: driver, level 4, private. Runs an io_context on the caller's thread until all connections
// stand or the deadline passes; afterwards no handler of it is left. It owns the listener and
// half-open connections, and hands over finished sockets. Fails with kDeadline, kMismatch,
// kUnsupported.
#pragma once

#include "mesh_peer.hpp"
#include "mesh_records.hpp"

namespace zensync::driver {

using MeshAcceptor = asio::basic_socket_acceptor<asio::ip::tcp, asio::io_context::executor_type>;

/// Listens on an ephemeral port of `address` (numeric). kUnsupported if that cannot be.
Status listen_on(const std::string& address, MeshAcceptor& acceptor);

/// One socket per rank, connected, shaken hands, non-blocking, without delay; that of this rank is
/// closed. Ends early with what `rendezvous.check()` says. kUnsupported, naming the rank, where one
/// refuses connections, or does not answer within options.connect_timeout; kDeadline at `deadline`.
Result<std::vector<MeshSocket>> connect_mesh(const NativeMeshOptions& options,
                                             const MeshRecords& records, MeshAcceptor& acceptor,
                                             Rendezvous& rendezvous, Clock::time_point deadline);

}  // namespace zensync::driver
