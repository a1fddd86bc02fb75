// PTX ISA "prefetch": starts to load the line of an address into a cache.
#pragma once

namespace flashsci::ptx {

__device__ __forceinline__ void prefetch_l1(const void* global) {
  asm volatile("prefetch.global.L1 [%0];\n" ::"l"(global));
}

__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(global));
}

}  // namespace flashsci::ptx
