// PTX ISA "stmatrix" (sm_90): the inverse of ldmatrix. Four 8x8 matrices of 16-bit elements; lane
// 8m+r gives the shared address of row r of matrix m; lane l holds of each matrix row l/4, columns
// 2(l%4), +1.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ void stmatrix_x4(uint32_t shared, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// ".trans": lane l holds of each matrix column l / 4, rows 2 (l % 4), +1.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t shared, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

}  // namespace flashsci::ptx
