// PTX ISA "ld.acquire", "red.release", "fence.proxy.async" on global memory (sm_90): CTAs take
// turns at writes of the copy engine.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ int load_acquire(const int* global) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(global) : "memory");
  return value;
}

__device__ __forceinline__ void add_release(int* global, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;\n" ::"l"(global), "r"(value) : "memory");
}

// Orders ordinary accesses and those of the copy engine to global memory.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

}  // namespace flashsci::ptx
