// Sampling a tensor for its density; see probe.hpp. Place: engine, level 5.
// Reads at most about kSampleElems elements, writes nothing but the header; cannot fail.
#include "probe.hpp"

#include <algorithm>

#include "zensync/base/hash.hpp"

namespace zensync {
namespace {
constexpr std::uint64_t kSampleElems = 65536;
constexpr std::uint64_t kLeastRows = 64;
constexpr std::uint64_t kMostRows = 4096;
constexpr std::uint64_t kCooScale = 1U << 20;
}  // namespace

void probe_dense(const kernels::Table& table, const TensorSpec& spec, const void* data,
                 std::uint64_t round, JobHeader& header) {
  if (spec.elems() == 0) return;
  const std::uint64_t rows = std::clamp(kSampleElems / spec.row_elems, kLeastRows, kMostRows);
  const std::uint64_t row_bytes = spec.row_elems * dtype_bytes(spec.dtype);
  std::uint64_t nonzero_elems = 0;
  for (std::uint64_t i = 0; i < rows; ++i) {
    const std::uint64_t row = mix64(header.key ^ mix64(round * kMostRows + i)) % spec.rows;
    const auto* start = static_cast<const std::byte*>(data) + row * row_bytes;
    const std::uint64_t found = table.count_nonzero(start, spec.row_elems, spec.dtype);
    header.probe_nonzero_rows += found != 0;
    nonzero_elems += found;
  }
  header.probe_rows = static_cast<std::uint32_t>(rows);
  header.probe_nonzero_elems =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(nonzero_elems, 0xFFFFFFFFU));
}

void probe_coo(const TensorSpec& spec, std::uint64_t entries, JobHeader& header) {
  if (spec.rows == 0) return;
  const double density = static_cast<double>(entries) / static_cast<double>(spec.rows);
  header.probe_rows = kCooScale;
  header.probe_nonzero_rows =
      static_cast<std::uint32_t>(std::min(density, 1.0) * static_cast<double>(kCooScale));
  header.probe_nonzero_elems = header.probe_nonzero_rows;
}

}  // namespace zensync
