// Which rank sums which unit: a bijection between units and (owner, slot). Place: partition,
// level 2. Pure arithmetic, no table, no memory of its own. `rotation` is the default: unit u of
// group q = u div n and lane r = u mod n belongs to owner (r + rot(q)) mod n, slot q. Within a
// group every owner gets one unit, so runs of non-zeros spread perfectly; the seeded rotation
// spreads strided patterns. `range` cuts the tensor into n equal runs, as most published schemes
// do. `cyclic` is the rotation that never rotates: owner u mod n, for owners that are given and not
// chosen. `whole` (n = 1) is the identity. A block of slots of all owners covers one run (rotation,
// cyclic) or n runs (range) of units.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "zensync/base/buffer.hpp"
#include "zensync/base/hash.hpp"
#include "zensync/base/types.hpp"

namespace zensync {

enum class PartitionKind : std::uint8_t { kRotation = 0, kRange = 1, kCyclic = 2 };

class Partition {
 public:
  /// `units` U ≥ 0 over `owners` n ≥ 1; `key` seeds the rotation.
  Partition(PartitionKind kind, std::uint64_t units, int owners, std::uint64_t key);
  /// One owner, slot = unit.
  static Partition whole(std::uint64_t units) { return {PartitionKind::kRange, units, 1, 0}; }

  auto operator<=>(const Partition&) const = default;

  PartitionKind kind() const { return kind_; }
  std::uint64_t units() const { return units_; }
  int owners() const { return static_cast<int>(owners_); }
  /// ⌈U/n⌉, the same for every owner (the last slots of some owners have no unit).
  std::uint64_t slots() const { return slots_; }

  Rank owner_of(UnitId unit) const;
  std::uint64_t slot_of(UnitId unit) const {
    return kind_ != PartitionKind::kRange ? unit / owners_ : unit % slots_;
  }
  /// May be ≥ units(): then this slot of this owner has no unit.
  UnitId unit_at(Rank owner, std::uint64_t slot) const {
    const auto o = static_cast<std::uint64_t>(owner.value);
    return kind_ != PartitionKind::kRange ? slot * owners_ + lane_of(o, slot) : o * slots_ + slot;
  }

  /// Runs of units that the slots [slot_lo, slot_hi) of all owners cover, clipped to U.
  int runs() const { return kind_ != PartitionKind::kRange ? 1 : owners(); }
  UnitId run_begin(int run, std::uint64_t slot_lo) const;
  UnitId run_end(int run, std::uint64_t slot_hi) const;

  /// at[i] = unit_at(owner, slot_lo + offsets[i]) − run_begin(run of owner, slot_lo), i < count.
  void units_of(Rank owner, std::uint64_t slot_lo, const std::uint16_t* offsets, std::size_t count,
                std::uint32_t* at) const;
  int run_of(Rank owner) const { return kind_ != PartitionKind::kRange ? 0 : owner.value; }

 private:
  friend class Splitter;
  std::uint64_t rotation_of(std::uint64_t slot) const {
    return ((mix64(slot ^ seed_) >> 32) * spread_) >> 32;
  }
  std::uint64_t lane_of(std::uint64_t owner, std::uint64_t slot) const {
    const std::uint64_t rotation = rotation_of(slot);
    return owner >= rotation ? owner - rotation : owner + owners_ - rotation;
  }

  PartitionKind kind_;
  std::uint64_t units_;
  std::uint64_t owners_;
  std::uint64_t slots_;
  std::uint64_t seed_;
  std::uint64_t spread_;  ///< rotations are in [0, spread): n, or 0 where none is
};

/// The units of one block of slots, listed by owner. Kept and reused by the caller.
class Splitter {
 public:
  explicit Splitter(int owners);

  /// Empties all lists; then lists take units of the block that starts at `slot_lo`.
  void begin_block(const Partition& partition, std::uint64_t slot_lo);
  /// Adds units run_begin + rel[i], ascending. Each is remembered by `at`: rel[i], or first_at + i
  /// when the values lie packed in order of the units.
  void add(int run, const std::uint32_t* rel, std::size_t count);
  void add_packed(int run, const std::uint32_t* rel, std::size_t count, std::uint32_t first_at);

  std::size_t count(int owner) const { return counts_[static_cast<std::size_t>(owner)]; }
  const std::uint16_t* offsets(int owner) const { return offsets_.data() + stride_ * owner; }
  const std::uint32_t* at(int owner) const { return at_.data() + stride_ * owner; }

 private:
  template <bool kPacked>
  void add_rotation(const std::uint32_t* rel, std::size_t count, std::uint32_t first_at);
  template <bool kPacked>
  void add_range(int run, const std::uint32_t* rel, std::size_t count, std::uint32_t first_at);

  const Partition* partition_ = nullptr;
  std::uint64_t slot_lo_ = 0;
  std::size_t stride_;
  std::uint64_t magic_ = 0;  ///< ⌈2^46 / n⌉: rel / n for rel < 2^14 · n, n < 2^16
  std::vector<std::size_t> counts_;
  Array<std::uint16_t> offsets_;
  Array<std::uint32_t> at_;
};

}  // namespace zensync
