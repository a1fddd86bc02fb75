// PTX ISA "mma.m16n8k8" (sm_75 and newer), fp16 operands, fp32 accumulator; and the cvt of sm_75.
// Lane l, g = l/4, t = l%4. A: {(g, 2t), (g+8, 2t)} pairs along k; B: {(k 2t, n g)} pair along k;
// C: {(g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)}.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ void mma_m16n8k8_f16(float (&c)[4], uint32_t a0, uint32_t a1,
                                                uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// Rounds to nearest; the packing cvt.rn.f16x2 begins with sm_80.
__device__ __forceinline__ uint16_t cvt_f16(float x) {
  uint16_t y;
  asm("cvt.rn.f16.f32 %0, %1;\n" : "=h"(y) : "f"(x));
  return y;
}

}  // namespace flashsci::ptx
