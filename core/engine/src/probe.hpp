// Samples a dense tensor for its density. Place: engine, internal.
// Positions are a function of the key and the round, so all ranks look at the same rows.
#pragma once

#include "zensync/codec/headers.hpp"
#include "zensync/engine/engine.hpp"
#include "zensync/kernels/kernels.hpp"

namespace zensync {

/// Fills the probe fields of `header` from a sample of `data` (dense-stored, `spec`).
void probe_dense(const kernels::Table& table, const TensorSpec& spec, const void* data,
                 std::uint64_t round, JobHeader& header);
/// The same for a COO tensor of `entries` entries: its density is known.
void probe_coo(const TensorSpec& spec, std::uint64_t entries, JobHeader& header);

}  // namespace zensync
