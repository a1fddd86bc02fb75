// Online softmax over the accumulator fragments of one warp: rows g and g + 8 of each m16 block,
// columns 2t, 2t + 1 of each n8 block (lane = 4 g + t).
#pragma once
#include <cmath>
#include <cstdint>

#include "../ptx/math.cuh"

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

// tanh of |x| < 0.3, a = |x| and x2 = x^2: its Taylor series, relative error < 2e-7.
__device__ __forceinline__ float tanh_series(float a, float x2) {
  float t = fmaf(x2, 62.f / 2835.f, -17.f / 315.f);
  t = fmaf(x2, t, 2.f / 15.f);
  t = fmaf(x2, t, -1.f / 3.f);
  return fmaf(x2 * a, t, a);
}

// tanh to a few ulp of its value, without a branch: tanh.approx.f32 (2^-11) is too coarse for a
// softcap. slope: 1 - tanh^2, to a few ulp of its own value also where tanh is nearly 1.
__device__ __forceinline__ float tanh_accurate(float x, float& slope) {
  const float a = fabsf(x);
  const float e = ptx::ex2_approx(-2.f * kLog2e * a);  // exp(-2|x|)
  const float inverse = ptx::rcp_approx(1.f + e);
  const float large = (1.f - e) * inverse;  // |x| >= 0.3
  slope = 4.f * e * (inverse * inverse);
  const float small = tanh_series(a, x * x);
  return copysignf(a < 0.3f ? small : large, x);
}

__device__ __forceinline__ float tanh_accurate(float x) {
  float slope;
  return tanh_accurate(x, slope);
}

// The same in one number, for kernels that have no register for the slope until they need it: tanh
// x where it is below 0.3, else 1 / (1 - |tanh x|) = (e^(2|x|) + 1) / 2, which exceeds 1; with the
// sign of x.
__device__ __forceinline__ float tanh_code(float x) {
  const float a = fabsf(x);
  const float inverse = fmaf(0.5f, ptx::ex2_approx(2.f * kLog2e * a), 0.5f);
  return copysignf(a < 0.3f ? tanh_series(a, x * x) : inverse, x);
}
__device__ __forceinline__ float tanh_of(float code) {
  const float large = copysignf(1.f - ptx::rcp_approx(fabsf(code)), code);
  return fabsf(code) < 1.f ? code : large;
}
__device__ __forceinline__ float slope_of(float code) {
  const float complement = ptx::rcp_approx(fabsf(code));
  return fabsf(code) < 1.f ? fmaf(-code, code, 1.f) : complement * (2.f - complement);
}

// Exponents are computed as fma(s, scale, -offset) from a rounded offset. The rounding grows with
// the offset (masks written as -1e9, scores of 1e7 and more): P of the largest score could take any
// value, also one beyond fp16. From kExactExponent on, kernels that keep a running maximum subtract
// it first. The backward has only a rounded lse: from kLargeExponent on it takes a value that is
// certainly too low, and limits P to 1; below, roundings of lse and scores make P wrong by a factor
// of 2 at most.
inline constexpr float kExactExponent = 1 << 22, kLargeExponent = 1 << 20;

__device__ __forceinline__ bool is_large(float exponent) {
  return fabsf(exponent) > kLargeExponent;
}

// lse in powers of two, as the backward takes it (lse is not -inf). The result is finite: the
// lowest numbers of bf16 and fp32 would overflow in powers of two.
__device__ __forceinline__ float lse_of_backward(float lse) {
  const float x = fminf(fmaxf(lse * kLog2e, -3.3e38f), 3.3e38f);
  constexpr float kMargin = 1.f / (1 << 18);  // roundings of lse, its product and the scores' sums
  return is_large(x) ? fmaf(fabsf(x), -kMargin, x) : x;
}

// Limits P to 1, for warps in which the lse of any row is large.
template <int kCount>
__device__ __forceinline__ void limit_probabilities(float (&p)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) p[e] = fminf(p[e], 1.f);
}
template <int kM, int kN>
__device__ __forceinline__ void limit_probabilities(float (&p)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i)
    p[i / (4 * kN)][i / 4 % kN][i % 4] = fminf(p[i / (4 * kN)][i / 4 % kN][i % 4], 1.f);
}

// Whether the lse is large, for rows whose statistics are in registers: [m16, row g or g + 8], lse
// first.
template <int kM>
__device__ __forceinline__ bool any_large(const float2 (&statistics)[kM][2]) {
  bool large = false;
#pragma unroll
  for (int i = 0; i < kM * 2; ++i) large |= is_large(statistics[i / 2][i % 2].x);
  return __any_sync(0xffffffffu, large);
}

// Rescale the accumulators only when the maximum grew by more than 2^8. This is exact, since
// numerator and denominator share the stale maximum; P stays below 2^8, far inside fp16.
inline constexpr float kRescaleThreshold = 8.f;

// The reference of each row's exponents, in powers of two, for scores s. The scores may first
// become relative to row_max (in their units).
template <int kM, int kN>
__device__ __forceinline__ void offsets_of(float (&offset)[kM][2], float (&s)[kM][kN][4],
                                           const float (&row_max)[kM][2], float exp_scale) {
  bool large = false;
#pragma unroll
  for (int i = 0; i < kM * 2; ++i) {
    const float maximum = row_max[i / 2][i % 2];
    offset[i / 2][i % 2] = maximum == -INFINITY ? 0.f : maximum * exp_scale;
    large |= fabsf(offset[i / 2][i % 2]) > kExactExponent;
  }
  if (__any_sync(0xffffffffu, large)) {
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) {
      const float maximum = row_max[i / (4 * kN)][i % 4 / 2];
      s[i / (4 * kN)][i / 4 % kN][i % 4] -= maximum == -INFINITY ? 0.f : maximum;
    }
#pragma unroll
    for (int i = 0; i < kM * 2; ++i) offset[i / 2][i % 2] = 0.f;
  }
}

// The largest score of a lane in row g or g + 8 of an m16 block.
template <int kN>
__device__ __forceinline__ float lane_max(const float (&s)[kN][4], int half) {
  float x = fmaxf(s[0][half * 2], s[0][half * 2 + 1]);
#pragma unroll
  for (int n = 1; n < kN; ++n) x = fmaxf(x, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
  return x;
}

// The maximum of such a row becomes `next`; its sum and output are rescaled.
template <int kDimBlocks>
__device__ __forceinline__ void rescale_row(float& row_max, float& row_sum,
                                            float (&o)[kDimBlocks][4], int half, float next,
                                            float exp_scale) {
  // A row with no key yet has sum and output 0, which no factor changes.
  const float alpha = next == -INFINITY ? 1.f : ptx::ex2_approx((row_max - next) * exp_scale);
  row_max = next;
  row_sum *= alpha;
#pragma unroll
  for (int d = 0; d < kDimBlocks; ++d) {
    o[d][half * 2] *= alpha;
    o[d][half * 2 + 1] *= alpha;
  }
}

// S becomes P; the running maximum, sum and output are updated.
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
      tile_max[m][half] = quad_max(lane_max(s[m], half));
      grew |= (tile_max[m][half] - row_max[m][half]) * exp_scale > kRescaleThreshold;
    }
  }
  if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(row_max[m][half], tile_max[m][half]);
        rescale_row(row_max[m][half], row_sum[m][half], o[m], half, next, exp_scale);
      }
    }
  }
  float offset[kM][2];
  offsets_of(offset, s, row_max, exp_scale);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = half * 2; e < half * 2 + 2; ++e) {
          s[m][n][e] = ptx::ex2_approx(fmaf(s[m][n][e], exp_scale, -offset[m][half]));
          row_sum[m][half] += s[m][n][e];
        }
      }
    }
  }
}

// The same with less work between the products: lanes of a quad compare their own maxima only, and
// exchange them when one exceeds the threshold. row_max is the same in all lanes of a quad, -inf at
// first; exp_scale <= 1, so that no finite score overflows.
template <int kM, int kN, int kDimBlocks>
__device__ __forceinline__ void online_softmax_lazily(float (&s)[kM][kN][4],
                                                      float (&o)[kM][kDimBlocks][4],
                                                      float (&row_max)[kM][2],
                                                      float (&row_sum)[kM][2], float exp_scale) {
  float own_max[kM][2];
  bool grew = false;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      own_max[m][half] = lane_max(s[m], half);
      grew |= (own_max[m][half] - row_max[m][half]) * exp_scale > kRescaleThreshold;
    }
  }
  if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(row_max[m][half], quad_max(own_max[m][half]));
        rescale_row(row_max[m][half], row_sum[m][half], o[m], half, next, exp_scale);
      }
    }
  }
  float offset[kM][2];
  offsets_of(offset, s, row_max, exp_scale);
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
