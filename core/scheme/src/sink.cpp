// Writing sums back. Place: scheme. Dense: one scatter per block. COO: the owners' lists of a chunk
// are merged (each is sorted) and whole rows appended. Chunks come in ascending order of units, so
// no later sort.
#include "zensync/scheme/sink.hpp"

#include <algorithm>
#include <cstring>

namespace zensync {

namespace {
constexpr std::size_t kHistogramStep = 16;  ///< every 16th unit stands for 16
}

void UnitSink::start_dense(void* data, std::size_t unit_bytes) {
  data_ = static_cast<std::byte*>(data);
  unit_bytes_ = unit_bytes;
  union_units_ = 0;
  histogram_.assign(kHistogramBins, 0);
}

void UnitSink::start_coo(std::uint64_t parts, std::size_t unit_bytes) {
  start_dense(nullptr, unit_bytes);
  parts_ = parts;
  entries_.clear();
  list_ends_.clear();
  rows_.clear();
  values_.clear();
}

void UnitSink::count(const Region& region, const SparseSet& set) {
  union_units_ += set.units();
  const auto slots = static_cast<double>(region.partition->slots());
  const double bins_per_slot = static_cast<double>(kHistogramBins) / slots;
  for (const BlockRun& run : set.runs) {
    const std::uint64_t slot_lo = region.slot_lo + run.block * kernels::kBlockSlots;
    for (std::size_t i = 0; i < run.count; i += kHistogramStep) {
      const std::uint64_t slot = slot_lo + set.offsets[run.begin + i];
      const auto bin = static_cast<std::uint64_t>(static_cast<double>(slot) * bins_per_slot);
      histogram_[std::min(bin, kHistogramBins - 1)] +=
          std::min<std::uint64_t>(kHistogramStep, run.count - i);
    }
  }
}

UnitId UnitSink::locate(const Region& region, const SparseSet& set, const BlockRun& run) {
  const Partition& partition = *region.partition;
  const std::uint64_t slot_lo = region.slot_lo + run.block * kernels::kBlockSlots;
  at_.resize_discard(kernels::kBlockSlots);
  partition.units_of(region.owner, slot_lo, set.offsets.data() + run.begin, run.count, at_.data());
  return partition.run_begin(partition.run_of(region.owner), slot_lo);
}

void UnitSink::put(const kernels::Table& table, const Region& region, const SparseSet& set) {
  count(region, set);
  if (data_ == nullptr) {
    collect(region, set);
    return;
  }
  const auto* values = static_cast<const std::byte*>(set.values);
  for (const BlockRun& run : set.runs) {
    const UnitId base = locate(region, set, run);
    table.scatter(data_ + base * unit_bytes_, at_.data(), run.count, unit_bytes_,
                  values + run.begin * unit_bytes_);
  }
}

void UnitSink::collect(const Region& region, const SparseSet& set) {
  const auto* value = static_cast<const std::byte*>(set.values);
  for (const BlockRun& run : set.runs) {
    const UnitId base = locate(region, set, run);
    for (std::size_t i = 0; i < run.count; ++i, value += unit_bytes_) {
      entries_.push_back({base + at_[i], value});
    }
  }
  list_ends_.push_back(entries_.size());
}

void UnitSink::merge_lists() {
  const auto by_unit = [](const Entry& a, const Entry& b) { return a.unit < b.unit; };
  merged_.resize(entries_.size());
  while (list_ends_.size() > 1) {
    std::vector<std::size_t> ends;
    std::size_t begin = 0;
    for (std::size_t i = 0; i < list_ends_.size(); i += 2) {
      const std::size_t middle = list_ends_[i];
      const std::size_t end = i + 1 < list_ends_.size() ? list_ends_[i + 1] : middle;
      const auto* data = entries_.data();
      std::merge(data + begin, data + middle, data + middle, data + end, merged_.data() + begin,
                 by_unit);
      ends.push_back(end);
      begin = end;
    }
    entries_.swap(merged_);
    list_ends_.swap(ends);
  }
}

Status UnitSink::end_chunk() {
  if (data_ != nullptr) return {};
  merge_lists();
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const UnitId row = entries_[i].unit / parts_;
    const std::uint64_t part = entries_[i].unit % parts_;
    const bool starts = part == 0;
    if (starts) {
      const std::size_t rows = rows_.size();
      rows_.resize_keep(rows + 1);
      rows_[rows] = static_cast<std::int64_t>(row);
    }
    const std::uint64_t expected =
        static_cast<std::uint64_t>(values_.size()) / unit_bytes_ % parts_;
    if (part != expected || rows_.empty() ||
        rows_[rows_.size() - 1] != static_cast<std::int64_t>(row)) {
      return make_error(ErrorKind::kCorruptMessage,
                        "row " + std::to_string(row) + " of a COO tensor came in part only");
    }
    values_.append(entries_[i].value, unit_bytes_);
  }
  entries_.clear();
  list_ends_.clear();
  return {};
}

}  // namespace zensync
