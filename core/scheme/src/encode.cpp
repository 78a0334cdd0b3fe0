// Encoding a range of slots; see encode.hpp. Place: scheme, level 3.
// Uses the workspace of the job; cannot fail (but for std::bad_alloc).
#include "encode.hpp"

#include <algorithm>
#include <limits>

namespace zensync {
namespace {

using kernels::kBlockSlots;

/// Counts distinct rows of ascending single elements, across blocks.
struct RowCounter {
  std::uint64_t row_elems;
  UnitId row_end = 0;
  std::uint64_t rows = 0;
  void add(UnitId begin, const std::uint32_t* rel, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const UnitId unit = begin + rel[i];
      if (unit < row_end) continue;
      ++rows;
      row_end = (unit / row_elems + 1) * row_elems;
    }
  }
};

class RangeEncoder {
 public:
  RangeEncoder(SchemeContext& context, const EncodeRange& range, std::span<MessageWriter> writers)
      : context_(context),
        range_(range),
        writers_(writers),
        rows_{context.spec.row_elems},
        counts_rows_(context.plan.width == 1 && context.spec.row_elems > 1 &&
                     range.partition->kind() == PartitionKind::kRotation),
        counts_elems_(context.plan.width > 1 && context.source->is_scanned()) {}

  void run(MessageHeader& totals) {
    const std::uint64_t blocks = div_ceil(range_.end - range_.begin, kBlockSlots);
    for (std::uint64_t block = next_block(0); block < blocks; block = next_block(block + 1)) {
      encode_block(block);
    }
    totals.total_units += units_;
    if (counts_elems_) totals.total_elements += elements_;
    if (counts_rows_) totals.total_elements += rows_.rows;
  }

 private:
  /// The least block ≥ `block` that may have units.
  std::uint64_t next_block(std::uint64_t block) const {
    if (context_.source->is_scanned()) return block;
    const Partition& partition = *range_.partition;
    std::uint64_t best = std::numeric_limits<std::uint64_t>::max();
    const std::uint64_t slot_lo = range_.begin + block * kBlockSlots;
    if (slot_lo >= range_.end) return best;
    for (int run = 0; run < partition.runs(); ++run) {
      const UnitId unit = context_.source->next(partition.run_begin(run, slot_lo));
      if (unit >= partition.run_end(run, range_.end)) continue;
      best = std::min(best, (partition.slot_of(unit) - range_.begin) / kBlockSlots);
    }
    return best;
  }

  void encode_block(std::uint64_t block) {
    const Partition& partition = *range_.partition;
    Splitter& splitter = *range_.splitter;
    const std::uint64_t slot_lo = range_.begin + block * kBlockSlots;
    const std::uint64_t slot_hi = std::min<std::uint64_t>(range_.end, slot_lo + kBlockSlots);
    splitter.begin_block(partition, slot_lo);
    Array<std::uint32_t>& rel = context_.workspace->rel;
    for (int run = 0; run < partition.runs(); ++run) {
      const UnitId begin = partition.run_begin(run, slot_lo);
      const Found found =
          context_.source->find(*context_.kernels, begin, partition.run_end(run, slot_hi), rel);
      if (found.count == 0) continue;
      units_ += found.count;
      if (counts_rows_) rows_.add(begin, rel.data(), found.count);
      if (found.packed) {
        splitter.add_packed(run, rel.data(), found.count, 0);
      } else {
        splitter.add(run, rel.data(), found.count);
      }
      const bool all = partition.kind() != PartitionKind::kRange;  // a run has units of all owners
      for (int owner = all ? 0 : run; owner < (all ? partition.owners() : run + 1); ++owner) {
        write_owner(owner, block, found.base);
      }
    }
  }

  void write_owner(int owner, std::uint64_t block, const void* base) {
    const Splitter& splitter = *range_.splitter;
    const std::size_t count = splitter.count(owner);
    if (count == 0) return;
    const std::size_t unit_bytes = context_.source->unit_bytes();
    MessageWriter& writer = writers_[static_cast<std::size_t>(owner)];
    std::byte* values = writer.add_values(count * unit_bytes);
    context_.kernels->gather(base, splitter.at(owner), count, unit_bytes, values);
    if (counts_elems_) {
      elements_ += context_.kernels->count_nonzero(values, count * context_.source->width(),
                                                   context_.source->dtype());
    }
    writer.add_block(block, {splitter.offsets(owner), count});
  }

  SchemeContext& context_;
  const EncodeRange& range_;
  std::span<MessageWriter> writers_;
  RowCounter rows_;
  bool counts_rows_;
  bool counts_elems_;
  std::uint64_t units_ = 0;
  std::uint64_t elements_ = 0;
};

}  // namespace

void encode_range(SchemeContext& context, const EncodeRange& range,
                  std::span<MessageWriter> writers, MessageHeader& totals) {
  RangeEncoder(context, range, writers).run(totals);
}

MessageHeader make_header(const SchemeContext& context, MessageKind kind, std::size_t chunk) {
  MessageHeader header;
  header.kind = kind;
  header.codec = context.wire.codec;
  header.sequence = context.job.sequence;
  header.chunk = static_cast<std::uint16_t>(chunk);
  return header;
}

void finish_set(SchemeContext& context, SparseSet& set, Buffer& final_values) {
  const std::size_t elems = set.units() * context.plan.width;
  const DType dtype = context.spec.dtype;
  if (sum_dtype(dtype) == dtype) {
    if (context.divisor() != 1.0) {
      context.kernels->finish(set.storage.data(), set.storage.data(), elems, dtype,
                              context.divisor());
    }
    return;
  }
  final_values.resize_discard(elems * dtype_bytes(dtype));
  context.kernels->finish(set.storage.data(), final_values.data(), elems, dtype, context.divisor());
  set.values = final_values.data();
  set.values_dtype = dtype;
}

}  // namespace zensync
