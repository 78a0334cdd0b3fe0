// The SIMD kernels, compiled once per target of the processor family by Highway's foreach_target,
// and one Table for each. Place: kernels, private; the registry asks `simd_tables` which of them
// this processor runs. The kernels are in the *_inl.hpp files; this file only repeats and lists
// them. Standard headers come first, outside the regions of a target: code that the linker may
// share between files must not use a target's instructions. Highway's emulated targets are left
// out: `ref` takes their place. Tables are constants; nothing here can fail.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "tables.hpp"
#include "zensync/base/fp_env.hpp"

#define HWY_WANT_AVX3_DL  // compression of 16-bit lanes in a register
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tables.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#ifndef ZENSYNC_KERNELS_TABLE_OF
#define ZENSYNC_KERNELS_TABLE_OF
namespace zensync::kernels {
/// The table of a target (one bit of Highway's set); null where it isn't compiled.
template <std::int64_t kTarget>
constexpr const Table* kTableOf = nullptr;

/// "N_AVX2" → "avx2".
constexpr std::array<char, 24> target_name(std::string_view name_space) {
  std::array<char, 24> name{};
  for (std::size_t i = 2; i < name_space.size(); ++i) {
    const char c = name_space[i];
    name[i - 2] = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return name;
}
}  // namespace zensync::kernels
#endif

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
// Order matters only in that the macros of one target are in force for all of them.
#include "cpu/find_inl.hpp"
#include "cpu/move_inl.hpp"
#include "cpu/pack_inl.hpp"
#include "cpu/sum_inl.hpp"

namespace zensync::kernels {
namespace HWY_NAMESPACE {

constexpr auto kName = target_name(HWY_STR(HWY_NAMESPACE));
constexpr Table kTable = {
    .name = std::string_view(kName.data()),
    .find_units = find_units,
    .count_nonzero = count_nonzero,
    .add_units = add_units,
    .finish = finish,
    .gather = gather,
    .scatter = scatter,
    .pack_bitmap = pack_bitmap,
    .unpack_bitmap = unpack_bitmap,
    .pack_elias_fano = pack_elias_fano,
    .unpack_elias_fano = unpack_elias_fano,
};

}  // namespace HWY_NAMESPACE

template <>
constexpr const Table* kTableOf<HWY_TARGET> = &HWY_NAMESPACE::kTable;

}  // namespace zensync::kernels
#endif

#if HWY_ONCE
namespace zensync::kernels {
namespace {

template <std::size_t... kBits>
std::vector<const Table*> list_tables(std::index_sequence<kBits...>) {
  const std::int64_t supported = hwy::SupportedTargets();
  std::vector<const Table*> tables;
  // A lower bit is a better target of the same processor family.
  const auto offer = [&](std::int64_t target, const Table* table) {
    if (table != nullptr && (supported & target) != 0) tables.push_back(table);
  };
  (offer(std::int64_t{1} << kBits, kTableOf<(std::int64_t{1} << kBits)>), ...);
  return tables;
}

}  // namespace

std::vector<const Table*> simd_tables() { return list_tables(std::make_index_sequence<63>()); }

}  // namespace zensync::kernels
#endif
