// PTX ISA "Half Precision Floating Point Instructions" on pairs of fp16 in a register.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("mul.rn.f16x2 %0, %1, %2;\n" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// The larger magnitudes; NaN loses against a number.
__device__ __forceinline__ uint32_t max_abs_f16x2(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("{\n.reg .b32 x, y;\nabs.f16x2 x, %1;\nabs.f16x2 y, %2;\nmax.f16x2 %0, x, y;\n}\n"
      : "=r"(c)
      : "r"(a), "r"(b));
  return c;
}

__device__ __forceinline__ float2 cvt_f32_f16x2(uint32_t a) {
  float2 y;
  asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.f32.f16 %0, x;\ncvt.f32.f16 %1, y;\n}\n"
      : "=f"(y.x), "=f"(y.y)
      : "r"(a));
  return y;
}

}  // namespace flashsci::ptx
