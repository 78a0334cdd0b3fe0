// Finding units in a range: by search or by list; see source.hpp. Place: scheme, level 3.
// Cannot fail; reads and (for -0.0) writes the memory of the caller only.
#include "zensync/scheme/source.hpp"

#include <algorithm>
#include <limits>

namespace zensync {

UnitSource UnitSource::scanned(void* data, std::uint64_t width, DType dtype) {
  UnitSource source;
  source.scan_ = data;
  source.width_ = width;
  source.dtype_ = dtype;
  return source;
}

UnitSource UnitSource::listed(const void* values, const RowList& list, std::uint64_t width,
                              DType dtype, bool dense) {
  UnitSource source;
  source.values_ = values;
  source.rows_ = list;
  source.dense_ = dense;
  source.width_ = width;
  source.dtype_ = dtype;
  return source;
}

std::uint64_t UnitSource::lower_row(std::uint64_t row) const {
  const auto* end = rows_.rows + rows_.count;
  return static_cast<std::uint64_t>(std::lower_bound(rows_.rows, end, row) - rows_.rows);
}

UnitId UnitSource::next(UnitId from) const {
  if (scan_ != nullptr) return from;
  const std::uint64_t row = from / rows_.parts;
  const std::uint64_t i = lower_row(row);
  if (i == rows_.count) return std::numeric_limits<UnitId>::max();
  return std::max(from, rows_.rows[i] * rows_.parts);
}

Found UnitSource::find(const kernels::Table& table, UnitId begin, UnitId end,
                       Array<std::uint32_t>& rel) {
  Found found;
  if (begin >= end) return found;
  if (scan_ != nullptr) {
    rel.resize_discard(end - begin + kernels::kSlackElems);
    auto* base = static_cast<std::byte*>(scan_) + begin * unit_bytes();
    found.base = base;
    found.count = table.find_units(base, end - begin, width_, dtype_, rel.data());
    return found;
  }
  // The first row may begin before the range, the last may end behind it.
  const std::uint64_t parts = rows_.parts;
  const std::uint64_t first = lower_row(begin / parts);
  const std::uint64_t last = lower_row(div_ceil(end, parts));
  rel.resize_discard((last - first) * parts);
  UnitId first_unit = 0;
  for (std::uint64_t i = first; i < last; ++i) {
    for (std::uint64_t part = 0; part < parts; ++part) {
      const UnitId unit = rows_.rows[i] * parts + part;
      if (unit < begin || unit >= end) continue;
      if (found.count == 0) first_unit = i * parts + part;
      rel[found.count++] = static_cast<std::uint32_t>(unit - begin);
    }
  }
  found.packed = !dense_;
  found.base =
      static_cast<const std::byte*>(values_) + (dense_ ? begin : first_unit) * unit_bytes();
  return found;
}

}  // namespace zensync
