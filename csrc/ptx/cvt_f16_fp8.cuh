// PTX ISA "cvt" from 8-bit floats to fp16 (sm_89 and newer): exact, and NaN stays NaN.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

// The four bytes of a word, the lowest in the low half of x.
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
