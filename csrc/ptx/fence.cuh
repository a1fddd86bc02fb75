// PTX ISA "fence.proxy", and accesses to global memory that order others: "atom.acq_rel",
// "ld.acquire", "red.release". CTAs see what others have written, and take turns.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

// Orders ordinary writes to shared memory before later reads of the copy engine or wgmma; called by
// every writing thread, before the barrier.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Orders ordinary accesses and those of the copy engine to global memory.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

// The number of CTAs that arrived before this one. The writes of this thread, and of threads it has
// synchronised with, are visible to every later arrival.
__device__ __forceinline__ uint32_t arrive(uint32_t* global) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\n"
               : "=r"(before)
               : "l"(global)
               : "memory");
  return before;
}

__device__ __forceinline__ int load_acquire(const int* global) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(global) : "memory");
  return value;
}

__device__ __forceinline__ void add_release(int* global, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;\n" ::"l"(global), "r"(value) : "memory");
}

}  // namespace flashsci::ptx
