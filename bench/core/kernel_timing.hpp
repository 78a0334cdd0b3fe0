// Times the loops that a step's local work consists of, each beside a memcpy of the same tensor in
// the same run. Place: bench, level 6; used by `zensync bench --kernels`. One thread; the caller's
// memory; nothing is printed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace zensync {

/// Seconds of one iteration: ours, then a memcpy of the tensor.
struct TimedPair {
  double ours_s = 0;
  double copy_s = 0;
};

/// Find + partition + encode of a dense-stored fp32 tensor for `ranks` owners in 8 chunks: what one
/// rank does before its pushes can leave, digests included.
std::vector<TimedPair> time_encode(std::span<float> tensor, int ranks, int iterations);

/// Finding the non-zero rows of a dense-stored fp32 tensor of rows of `row_elems`.
std::vector<TimedPair> time_find_rows(std::span<float> tensor, std::uint64_t row_elems,
                                      int iterations);

/// Decode + write back of what `time_encode`'s tensor would be pulled as: one message per owner
/// with all its units, into `tensor` itself.
std::vector<TimedPair> time_write_back(std::span<float> tensor, int ranks, int iterations);

/// Coalescing fp32 COO entries once; seconds. The sums stay in scratch of this call's thread.
double time_coalesce(std::span<const std::int64_t> indices, const float* values,
                     std::uint64_t row_elems);

}  // namespace zensync
