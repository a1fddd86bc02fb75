// PTX ISA "mma.m16n8k8" (sm_80 and newer), bf16 operands, fp32 accumulator. Fragments are those of
// mma_f16_k8.cuh.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ void mma_m16n8k8_bf16(float (&c)[4], uint32_t a0, uint32_t a1,
                                                 uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

}  // namespace flashsci::ptx
