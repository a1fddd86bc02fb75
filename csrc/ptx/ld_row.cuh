// PTX ISA "ld.global.nc" of 4, 8 and 16 bytes, issued in program order. The second-level cache
// fetches 128 bytes; neighbours use the rest.
#pragma once
#include <cuda_runtime.h>

namespace flashsci::ptx {

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

}  // namespace flashsci::ptx
