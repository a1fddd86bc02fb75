// PTX ISA "ld.global.nc": vectors that are read once, past L1.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

// Volatile: a load that is to fly during the code that follows must not sink to its use.
__device__ __forceinline__ void ld_global_nc_v4(uint32_t (&x)[4], const void* global) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "l"(global));
}

__device__ __forceinline__ void ld_global_nc_v2(uint32_t& x, uint32_t& y, const void* global) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.b32 {%0, %1}, [%2];\n"
               : "=r"(x), "=r"(y)
               : "l"(global));
}

}  // namespace flashsci::ptx
