// PTX ISA "mma.m16n8k8" (sm_80 and newer), TF32 operands, fp32 accumulator. Lane l, g = l/4, t =
// l%4. A: (g, t), (g+8, t), (g, t+4), (g+8, t+4); B: (k t, n g), (k t+4, n g); C: {(g, 2t), (g,
// 2t+1), (g+8, 2t), (g+8, 2t+1)}. Only the upper 19 bits of operands count.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace flashsci::ptx
