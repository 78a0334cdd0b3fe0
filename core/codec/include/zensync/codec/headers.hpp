// The two headers on the wire and how they are compared. docs/wire_format.md has the bytes.
// Place: codec, level 2. A message is: MessageHeader, JobHeaders (`job_headers` of them, usually 0
// or 1), values, index. All integers are little-endian; the handshake refuses peers of another byte
// order.
// Values, copied to and from messages with memcpy; no threads.
// `check_job_header` is pure and fails with kMismatch only; a header's own fields are checked when
// its message is parsed (message.hpp).
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "zensync/base/result.hpp"
#include "zensync/base/types.hpp"
#include "zensync/base/wire_version.hpp"

namespace zensync {

/// What a message is for; both ends must be at the same place of the same scheme.
enum class MessageKind : std::uint8_t {
  kPush = 1,    ///< balanced: units for their owner
  kPull = 2,    ///< balanced: an owner's sums
  kGather = 3,  ///< agsparse: all units of one rank
  kDouble = 4,  ///< recursive doubling: the sum over a block of ranks
  kReturn = 5,  ///< recursive doubling: the result, to a rank that was folded away
  kRingReduce = 6,
  kRingGather = 7,
  kAgree = 8,    ///< headers only: what comes next goes through a dense all-reduce
  kScatter = 9,  ///< reduce_scatter: units for the rank that is given as their owner
};
inline constexpr int kMaxMessageKind = 9;

/// How the index of a message is written.
enum class IndexCodec : std::uint8_t {
  kNone = 0,       ///< dense values, or no units
  kRaw32 = 1,      ///< slots as uint32
  kRaw64 = 2,      ///< slots as uint64
  kBlocks = 3,     ///< per block the smaller of bitmap and Elias–Fano
  kBitmap = 4,     ///< every block a bitmap
  kEliasFano = 5,  ///< every block Elias–Fano
};
inline constexpr int kMaxIndexCodec = 5;

/// 48 bytes in front of each message.
struct MessageHeader {
  std::uint64_t digest = 0;  ///< XXH3-64 of all that follows it; 0 when verify is off
  std::uint8_t version = kWireVersion;
  MessageKind kind = MessageKind::kPush;
  IndexCodec codec = IndexCodec::kNone;
  DType values_dtype = DType::kF32;
  std::uint32_t sequence = 0;     ///< of the job within its State
  std::uint16_t chunk = 0;        ///< chunk, or step of the scheme
  std::uint16_t job_headers = 0;  ///< how many follow
  std::uint32_t units = 0;        ///< units (ring: elements) in this message
  std::uint64_t index_bytes = 0;
  /// The sender's non-zero units so far (push: of the whole tensor over all owners; last chunk:
  /// all).
  std::uint64_t total_units = 0;
  std::uint64_t total_elements = 0;  ///< non-zero elements in them (width 1: rows); 0: not counted
};
static_assert(sizeof(MessageHeader) == 48);

/// What the caller asked for. A byte of each job header, so that ranks that ask for different
/// things are told which.
enum class JobCall : std::uint8_t {
  kAllReduce = 0,
  kScatterRows = 1,     ///< reduce_scatter, layout "rows"
  kScatterColumns = 2,  ///< reduce_scatter, layout "columns"
};

/// 64 bytes that say what the sender believes the job to be.
struct JobHeader {
  std::uint64_t key = 0;  ///< key_of(name)
  std::uint64_t rows = 0;
  std::uint64_t row_elems = 0;
  std::uint64_t plan_digest = 0;
  std::uint32_t sequence = 0;
  std::uint16_t size = 0;  ///< ranks
  DType dtype = DType::kF32;
  Layout layout = Layout::kDense;
  ReduceOp op = ReduceOp::kSum;
  JobCall call = JobCall::kAllReduce;
  std::uint8_t reserved[2] = {};
  std::uint32_t probe_rows = 0;  ///< rows sampled for the probe; 0: no probe
  std::uint32_t probe_nonzero_rows = 0;
  std::uint32_t probe_nonzero_elems = 0;
  std::uint64_t reserved2 = 0;
};
static_assert(sizeof(JobHeader) == 64);

/// Compares what a peer believes with what this rank does (probe fields aside). On a difference:
/// kMismatch, naming the peer, the tensor (this rank's name for it) and every field that differs,
/// with both values.
Status check_job_header(const JobHeader& mine, const JobHeader& theirs, Rank peer,
                        const std::string& tensor);

}  // namespace zensync
