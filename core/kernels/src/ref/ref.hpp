// The reference kernels: what each entry of Table does, said in the plainest way, any dtype and
// width. Place: kernels, private. They are the oracle of the SIMD kernels' tests and the table
// called "ref". Memory, sizes and results: see kernels.hpp. Nothing here allocates or fails.
#pragma once

#include "tables.hpp"

namespace zensync::kernels::ref {

std::size_t find_units(void* data, std::size_t units, std::size_t width, DType dtype,
                       std::uint32_t* out);
std::uint64_t count_nonzero(const void* data, std::size_t elems, DType dtype);
void add_units(void* sums, const std::uint32_t* at, const void* values, std::size_t count,
               std::size_t width, DType values_dtype);
void finish(const void* sums, void* out, std::size_t elems, DType out_dtype, double divisor);
void gather(const void* base, const std::uint32_t* at, std::size_t count, std::size_t unit_bytes,
            void* out);
void scatter(void* base, const std::uint32_t* at, std::size_t count, std::size_t unit_bytes,
             const void* in);
void pack_bitmap(const std::uint16_t* offsets, std::uint32_t count, std::uint32_t slots,
                 std::byte* out);
bool unpack_bitmap(const std::byte* in, std::uint32_t count, std::uint32_t slots,
                   std::uint16_t* offsets);
void pack_elias_fano(const std::uint16_t* offsets, std::uint32_t count, std::uint32_t slots,
                     std::byte* out);
bool unpack_elias_fano(const std::byte* in, std::uint32_t count, std::uint32_t slots,
                       std::uint16_t* offsets);

}  // namespace zensync::kernels::ref
