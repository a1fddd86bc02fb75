// PTX ISA "prefetch": starts bringing the line of an address into the second-level cache.
#pragma once

namespace flashsci::ptx {

__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(global));
}

}  // namespace flashsci::ptx
