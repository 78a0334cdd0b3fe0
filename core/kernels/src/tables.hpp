// What the parts of `kernels` show each other: the reference table and the tables of the SIMD
// targets. Place: kernels, private. The tables are constants that live for ever. `simd_tables`
// comes from cpu/tables.cpp, or from no_simd.cpp where the SIMD kernels are not built.
// Nothing here can fail.
#pragma once

#include <bit>
#include <vector>

#include "zensync/kernels/kernels.hpp"

namespace zensync::kernels {

static_assert(std::endian::native == std::endian::little, "bitmaps are written as 64-bit words");

extern const Table kRefTable;

/// Tables of the SIMD targets that this processor runs, best first; may be empty.
std::vector<const Table*> simd_tables();

}  // namespace zensync::kernels
