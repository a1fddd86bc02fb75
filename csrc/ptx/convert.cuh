// PTX ISA "cvt": the conversions between float types. They round to nearest.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

// low half = low, high half = high.
__device__ __forceinline__ uint32_t cvt_f16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// low half = low, high half = high.
__device__ __forceinline__ uint32_t cvt_bf16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// One element; the packing cvt.rn.f16x2 begins with sm_80.
__device__ __forceinline__ uint16_t cvt_f16(float x) {
  uint16_t y;
  asm("cvt.rn.f16.f32 %0, %1;\n" : "=h"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float cvt_f32_f16(uint16_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(y) : "h"(x));
  return y;
}

__device__ __forceinline__ float2 cvt_f32_f16x2(uint32_t a) {
  float2 y;
  asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.f32.f16 %0, x;\ncvt.f32.f16 %1, y;\n}\n"
      : "=f"(y.x), "=f"(y.y)
      : "r"(a));
  return y;
}

// Four numbers as e4m3 (sm_89 and newer), the first in the lowest byte. Numbers beyond 448 become
// 448; NaN stays NaN.
__device__ __forceinline__ uint32_t cvt_e4m3x4(float x0, float x1, float x2, float x3) {
  uint32_t word;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(word)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return word;
}

// The four 8-bit floats of a word (sm_89 and newer), the lowest in the low half of x: exact, and NaN
// stays NaN.
__device__ __forceinline__ uint2 cvt_f16x4_e4m3(uint32_t word) {
  uint2 wide;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
      : "=r"(wide.x), "=r"(wide.y)
      : "r"(word));
  return wide;
}

__device__ __forceinline__ uint2 cvt_f16x4_e5m2(uint32_t word) {
  uint2 wide;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e5m2x2 %0, low;\ncvt.rn.f16x2.e5m2x2 %1, high;\n}\n"
      : "=r"(wide.x), "=r"(wide.y)
      : "r"(word));
  return wide;
}

}  // namespace flashsci::ptx
