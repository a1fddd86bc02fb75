// PTX ISA "atom.acq_rel" (sm_70 and newer): the last of several CTAs sees what the others have written.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

// How many came before this one. What this thread and those it has synchronised with have written is there
// for whoever comes later and finds so.
__device__ __forceinline__ uint32_t arrive(uint32_t* global) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\n"
               : "=r"(before)
               : "l"(global)
               : "memory");
  return before;
}

}  // namespace flashsci::ptx
