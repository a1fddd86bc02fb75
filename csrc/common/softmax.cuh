// Online softmax over the accumulator fragments of one warp: rows g and g + 8 of each m16 block,
// columns 2t, 2t + 1 of each n8 block (lane = 4 g + t).
#pragma once
#include <cmath>
#include <cstdint>

#include "ptx/math.cuh"

namespace flashsci {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Element (lane, i) of the 4 x 4 words of a quad goes to (i, lane).
__device__ __forceinline__ void transpose_quad(uint32_t (&word)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? word[i] : word[i + bit], bit);
      (upper ? word[i] : word[i + bit]) = got;
    }
  }
}

// tanh to a few ulp of its value and no branch: tanh.approx.f32 (2^-11) is too coarse for a
// softcap.
__device__ __forceinline__ float tanh_accurate(float x) {
  const float a = fabsf(x);
  const float e = ptx::ex2_approx(-2.f * kLog2e * a);        // exp(-2|x|)
  const float large = (1.f - e) * ptx::rcp_approx(1.f + e);  // |x| >= 0.3
  const float x2 = x * x;                                    // Taylor, error < 2e-7 below
  float small = fmaf(x2, 62.f / 2835.f, -17.f / 315.f);
  small = fmaf(x2, small, 2.f / 15.f);
  small = fmaf(x2, small, -1.f / 3.f);
  small = fmaf(x2 * a, small, a);
  return copysignf(a < 0.3f ? small : large, x);
}

// Rescale the accumulators only when the maximum grew by more than 2^8: exact, since numerator and
// denominator share the stale maximum; P stays below 2^8, far inside fp16.
inline constexpr float kRescaleThreshold = 8.f;

// S becomes P; the running maximum, sum and output follow.
template <int kM, int kN, int kDimBlocks>
__device__ __forceinline__ void online_softmax(float (&s)[kM][kN][4], float (&o)[kM][kDimBlocks][4],
                                               float (&row_max)[kM][2], float (&row_sum)[kM][2],
                                               float exp_scale) {
  float tile_max[kM][2];
  bool grew = false;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = fmaxf(s[m][0][half * 2], s[m][0][half * 2 + 1]);
#pragma unroll
      for (int n = 1; n < kN; ++n) x = fmaxf(x, fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
      tile_max[m][half] = quad_max(x);
      grew |= (tile_max[m][half] - row_max[m][half]) * exp_scale > kRescaleThreshold;
    }
  }
  if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(row_max[m][half], tile_max[m][half]);
        // A row with no key yet has sum and output 0, whatever they are multiplied by.
        const float alpha =
            next == -INFINITY ? 1.f : ptx::ex2_approx((row_max[m][half] - next) * exp_scale);
        row_max[m][half] = next;
        row_sum[m][half] *= alpha;
#pragma unroll
        for (int d = 0; d < kDimBlocks; ++d) {
          o[m][d][half * 2] *= alpha;
          o[m][d][half * 2 + 1] *= alpha;
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float offset = row_max[m][half] == -INFINITY ? 0.f : row_max[m][half] * exp_scale;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = half * 2; e < half * 2 + 2; ++e) {
          s[m][n][e] = ptx::ex2_approx(fmaf(s[m][n][e], exp_scale, -offset));
          row_sum[m][half] += s[m][n][e];
        }
      }
    }
  }
}

// Below any score times exp_scale that is not hidden: what a row with no key yet is relative to.
inline constexpr float kNoKey = -3e38f;

// The same with less between the products: lanes of a quad compare their own maxima only, and talk
// when one has outgrown the threshold. offset: what the exponents of a row are relative to, the
// same in all lanes of a quad, kNoKey at first; exp_scale <= 1, so that no finite score overflows.
template <int kM, int kN, int kDimBlocks>
__device__ __forceinline__ void online_softmax_lazily(float (&s)[kM][kN][4],
                                                      float (&o)[kM][kDimBlocks][4],
                                                      float (&offset)[kM][2],
                                                      float (&row_sum)[kM][2], float exp_scale) {
  float lane_max[kM][2];
  bool grew = false;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = fmaxf(s[m][0][half * 2], s[m][0][half * 2 + 1]);
#pragma unroll
      for (int n = 1; n < kN; ++n) x = fmaxf(x, fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
      lane_max[m][half] = x;
      grew |= fmaf(x, exp_scale, -offset[m][half]) > kRescaleThreshold;
    }
  }
  if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(offset[m][half], quad_max(lane_max[m][half]) * exp_scale);
        const float alpha = ptx::ex2_approx(offset[m][half] - next);
        offset[m][half] = next;
        row_sum[m][half] *= alpha;
#pragma unroll
        for (int d = 0; d < kDimBlocks; ++d) {
          o[m][d][half * 2] *= alpha;
          o[m][d][half * 2 + 1] *= alpha;
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[m][n][e] = ptx::ex2_approx(fmaf(s[m][n][e], exp_scale, -offset[m][e / 2]));
        row_sum[m][e / 2] += s[m][n][e];
      }
    }
  }
}

}  // namespace flashsci
