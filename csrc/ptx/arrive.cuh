// PTX ISA "atom.acq_rel" (sm_70 and newer): the last of several CTAs sees what the others have written.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

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

}  // namespace flashsci::ptx
