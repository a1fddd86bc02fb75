// PTX ISA "ldmatrix" (sm_75 and newer): four 8x8 matrices of 16-bit elements; lane 8m+r gives the
// shared address of row r of matrix m; lane l receives of each matrix row l/4, columns 2(l%4), +1
// (with .trans: rows 2(l%4), +1 of column l/4).
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

}  // namespace flashsci::ptx
