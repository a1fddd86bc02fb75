// PTX ISA "ld.acquire", "st.release" of 64 bits in global memory: what one CTA writes before it sets a
// flag, another may use once it has seen it.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ uint64_t load_flag(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];\n" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void store_flag(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;\n" ::"l"(flag), "l"(value) : "memory");
}

}  // namespace flashsci::ptx
