// Implementation of the partitions and of the splitter, whose inner loop is the hot part of a push.
// The splitter avoids a division per unit: a block has at most 2^14 slots, so rel < 2^14 · n, and a
// multiplication by ⌈2^46/n⌉ gives rel / n exactly (rel · n < 2^46 for n < 2^16).
#include "zensync/partition/partition.hpp"

#include <algorithm>

#include "zensync/kernels/kernels.hpp"

namespace zensync {
namespace {
constexpr unsigned kMagicShift = 46;
}  // namespace

Partition::Partition(PartitionKind kind, std::uint64_t units, int owners, std::uint64_t key)
    : kind_(kind),
      units_(units),
      owners_(static_cast<std::uint64_t>(owners)),
      slots_(div_ceil(units, static_cast<std::uint64_t>(owners))),
      seed_(mix64(key)),
      spread_(kind == PartitionKind::kCyclic ? 0 : owners_) {}

Rank Partition::owner_of(UnitId unit) const {
  if (kind_ == PartitionKind::kRange) return Rank{static_cast<int>(unit / slots_)};
  const std::uint64_t owner = unit % owners_ + rotation_of(unit / owners_);
  return Rank{static_cast<int>(owner >= owners_ ? owner - owners_ : owner)};
}

UnitId Partition::run_begin(int run, std::uint64_t slot_lo) const {
  const UnitId unit = kind_ != PartitionKind::kRange
                          ? slot_lo * owners_
                          : static_cast<std::uint64_t>(run) * slots_ + slot_lo;
  return std::min(unit, units_);
}

UnitId Partition::run_end(int run, std::uint64_t slot_hi) const { return run_begin(run, slot_hi); }

void Partition::units_of(Rank owner, std::uint64_t slot_lo, const std::uint16_t* offsets,
                         std::size_t count, std::uint32_t* at) const {
  if (kind_ == PartitionKind::kRange) {
    std::copy(offsets, offsets + count, at);
    return;
  }
  const auto o = static_cast<std::uint64_t>(owner.value);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t lane = lane_of(o, slot_lo + offsets[i]);
    at[i] = static_cast<std::uint32_t>(offsets[i] * owners_ + lane);
  }
}

Splitter::Splitter(int owners)
    : stride_(kernels::kBlockSlots + kernels::kSlackElems),
      counts_(static_cast<std::size_t>(owners)) {
  const auto n = static_cast<std::uint64_t>(owners);
  magic_ = ((1ULL << kMagicShift) + n - 1) / n;
  offsets_.resize_discard(stride_ * n);
  at_.resize_discard(stride_ * n);
}

void Splitter::begin_block(const Partition& partition, std::uint64_t slot_lo) {
  partition_ = &partition;
  slot_lo_ = slot_lo;
  std::fill(counts_.begin(), counts_.end(), 0);
}

template <bool kPacked>
void Splitter::add_rotation(const std::uint32_t* rel, std::size_t count, std::uint32_t first_at) {
  const Partition& partition = *partition_;
  const std::uint64_t owners = partition.owners_;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t offset = (rel[i] * magic_) >> kMagicShift;
    const std::uint64_t lane = rel[i] - offset * owners;
    std::uint64_t owner = lane + partition.rotation_of(slot_lo_ + offset);
    owner = owner >= owners ? owner - owners : owner;
    const std::size_t place = stride_ * owner + counts_[owner]++;
    offsets_[place] = static_cast<std::uint16_t>(offset);
    at_[place] = kPacked ? first_at + static_cast<std::uint32_t>(i) : rel[i];
  }
}

template <bool kPacked>
void Splitter::add_range(int run, const std::uint32_t* rel, std::size_t count,
                         std::uint32_t first_at) {
  const auto owner = static_cast<std::size_t>(run);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t place = stride_ * owner + counts_[owner]++;
    offsets_[place] = static_cast<std::uint16_t>(rel[i]);
    at_[place] = kPacked ? first_at + static_cast<std::uint32_t>(i) : rel[i];
  }
}

void Splitter::add(int run, const std::uint32_t* rel, std::size_t count) {
  if (partition_->kind() != PartitionKind::kRange) {
    add_rotation<false>(rel, count, 0);
  } else {
    add_range<false>(run, rel, count, 0);
  }
}

void Splitter::add_packed(int run, const std::uint32_t* rel, std::size_t count,
                          std::uint32_t first_at) {
  if (partition_->kind() != PartitionKind::kRange) {
    add_rotation<true>(rel, count, first_at);
  } else {
    add_range<true>(run, rel, count, first_at);
  }
}

}  // namespace zensync
