// Finds the units of a range of slots and writes them to one message per owner. Place: scheme,
// internal. Block by block, so that what was found is still in the cache when it is gathered and
// packed.
#pragma once

#include <span>

#include "zensync/scheme/context.hpp"

namespace zensync {

/// Slots [begin, end) of `partition`; `splitter` has as many owners as it.
struct EncodeRange {
  const Partition* partition = nullptr;
  Splitter* splitter = nullptr;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// Appends the units of `range` to writers[owner] (begun, with `range.end − range.begin` slots),
/// and adds to `totals.total_units`, `.total_elements` what was found.
void encode_range(SchemeContext& context, const EncodeRange& range,
                  std::span<MessageWriter> writers, MessageHeader& totals);

/// A header of `kind` for this job, step `chunk`, with the wanted codec.
MessageHeader make_header(const SchemeContext& context, MessageKind kind, std::size_t chunk);

/// Rounds sums to the tensor's dtype, divided for AVG, and makes them the values of `set`.
void finish_set(SchemeContext& context, SparseSet& set, Buffer& final_values);

}  // namespace zensync
