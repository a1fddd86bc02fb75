// PTX ISA "Floating Point Instructions": single-instruction approximations in fp32, and arithmetic
// on pairs of fp16 in a register.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

// 2^x, 2 ulp; -inf gives +0.
__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// 1/x, 1 ulp.
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// log2(x), absolute error 2^-22 near 1, 1 ulp elsewhere.
__device__ __forceinline__ float lg2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

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

}  // namespace flashsci::ptx
