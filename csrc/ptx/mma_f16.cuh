// PTX ISA "mma.m16n8k16" (sm_80 and newer), fp16 operands, fp32 accumulator; and the cvt that
// packs. Lane l, g = l/4, t = l%4. A: {(g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8)} pairs along k;
// B: {(k 2t, n g), (k 2t+8, n g)} pairs along k; C: {(g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)}.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// low half = low, high half = high.
__device__ __forceinline__ uint32_t cvt_f16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float cvt_f32_f16(uint16_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(y) : "h"(x));
  return y;
}

}  // namespace flashsci::ptx
