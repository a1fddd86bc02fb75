// PTX ISA "cvt" to e4m3 (sm_89 and newer).
#pragma once
#include <cstdint>

namespace flashsci::ptx {

// Four numbers rounded to nearest, the first in the lowest byte. Numbers beyond 448 become 448; NaN
// stays NaN.
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

}  // namespace flashsci::ptx
