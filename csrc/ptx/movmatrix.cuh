// PTX ISA "movmatrix" (sm_75 and newer): an 8x8 matrix of 16-bit elements across a warp becomes its
// transpose; lane l holds columns 2(l%4), +1 of row l/4.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace flashsci::ptx
