// PTX ISA "cp.async" under a predicate (sm_80 and newer).
#pragma once
#include "cp_async.cuh"

namespace flashsci::ptx {

// 16 bytes, past L1, where `wanted`; else nothing is read or written. There is no branch, so that
// calls share their common address arithmetic.
__device__ __forceinline__ void cp_async_16_if(bool wanted, uint32_t shared, const void* global) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "@p cp.async.cg.shared.global.L2::128B [%1], [%2], 16;\n"
      "}\n" ::"r"(static_cast<uint32_t>(wanted)),
      "r"(shared), "l"(global)
      : "memory");
}

}  // namespace flashsci::ptx
