// PTX ISA "ldmatrix" of two 8x8 matrices (sm_75 and newer): as ldmatrix.cuh, with the addresses of
// lanes 0 to 15.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared)
               : "memory");
}

}  // namespace flashsci::ptx
