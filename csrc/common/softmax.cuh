// Online softmax over the accumulator fragments of one warp: rows g and g + 8 of each m16 block,
// columns 2t, 2t + 1 of each n8 block (lane = 4 g + t).
#pragma once
#include "ptx/math.cuh"

namespace flashsci {

inline constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// tanh to a few ulp of its value and no branch: tanh.approx.f32 (2^-11) is too coarse for a softcap.
__device__ __forceinline__ float tanh_accurate(float x) {
  const float a = fabsf(x);
  const float e = ptx::ex2_approx(-2.f * kLog2e * a);                 // exp(-2|x|)
  const float large = (1.f - e) * ptx::rcp_approx(1.f + e);           // |x| >= 0.3
  const float x2 = x * x;                                             // Taylor, error < 2e-7 below
  float small = fmaf(x2, 62.f / 2835.f, -17.f / 315.f);
  small = fmaf(x2, small, 2.f / 15.f);
  small = fmaf(x2, small, -1.f / 3.f);
  small = fmaf(x2 * a, small, a);
  return copysignf(a < 0.3f ? small : large, x);
}

}  // namespace flashsci
