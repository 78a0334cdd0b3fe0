// Stands in for cpu/tables.cpp in a build with ZENSYNC_SIMD=OFF: there are no SIMD kernels.
// Place: kernels, private. The registry then offers `ref` alone and refuses every other name,
// so that whoever asks for a target learns that it is not built in. Nothing here can fail.
#include "tables.hpp"

namespace zensync::kernels {

std::vector<const Table*> simd_tables() { return {}; }

}  // namespace zensync::kernels
