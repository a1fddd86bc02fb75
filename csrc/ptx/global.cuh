// PTX ISA "ld.global.nc" and "prefetch": reads of global memory.
#pragma once
#include <cuda_runtime.h>

namespace flashsci::ptx {

// Rows of 4, 8 and 16 bytes, issued in program order. The second-level cache fetches 128 bytes;
// neighbours use the rest.
__device__ __forceinline__ void ld_row(float& x, const float* from) {
  asm volatile("ld.global.nc.L2::128B.f32 %0, [%1];\n" : "=f"(x) : "l"(from));
}
__device__ __forceinline__ void ld_row(uint2& x, const uint2* from) {
  asm volatile("ld.global.nc.L2::128B.v2.u32 {%0, %1}, [%2];\n" : "=r"(x.x), "=r"(x.y) : "l"(from));
}
__device__ __forceinline__ void ld_row(float4& x, const float4* from) {
  asm volatile("ld.global.nc.L2::128B.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from));
}

// Starts to load the line of an address into a cache.
__device__ __forceinline__ void prefetch_l1(const void* global) {
  asm volatile("prefetch.global.L1 [%0];\n" ::"l"(global));
}

__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(global));
}

}  // namespace flashsci::ptx
