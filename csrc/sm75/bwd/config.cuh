// The common part of the backward kernels: values that the host derives from the parameters,
// places, the workspace, and the steps from S and dP to P and dS.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../core/coord.cuh"
#include "../../core/mask.cuh"
#include "../../core/score_mod.cuh"
#include "../../core/smem_tile.cuh"
#include "../../core/softmax.cuh"
#include "../../core/tile_rows.cuh"
#include "../../core/varlen.cuh"
#include "../../include/flashsci.h"

namespace flashsci::sm75::bwd {

static_assert(std::is_trivially_copyable_v<FlashsciBackwardParams>, "passed to kernels by value");

struct BackwardPlan {
  // Workspace. statistics: [B0, B1, Hq, Sq] of (-lse in log2 units, -delta); (-inf, 0) where a row
  // sees no key.
  float2* statistics;
  float* bias_sums;  // [splits, elements of dbias], when the members are split
  ScorePlan scores;
  float bias_factor;  // from natural units to those of s
  int vector;         // q, k, v, dout rows take 16-byte copies
  int vector_dq, vector_dk, vector_dv;
  int writes_bias;  // dbias has an element for every pair
};

// dP starts at -delta. statistics: [m16, row g or g + 8], for rows that are queries.
template <int kM, int kN>
__device__ __forceinline__ void start_from_delta(float (&dp)[kM][kN][4],
                                                 const float2 (&statistics)[kM][2]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i)
    dp[i / (4 * kN)][i / 4 % kN][i % 4] = statistics[i / (4 * kN)][i % 4 / 2].y;
}

// S becomes P.
template <int kM, int kN>
__device__ __forceinline__ void exponentiate(float (&s)[kM][kN][4],
                                             const float2 (&statistics)[kM][2],
                                             const BackwardPlan& plan) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) {
    const int m = i / (4 * kN), n = i / 4 % kN, e = i % 4;
    s[m][n][e] = ptx::ex2_approx(fmaf(s[m][n][e], plan.scores.exp_scale, statistics[m][e / 2].x));
  }
  if (any_large(statistics)) limit_probabilities(s);
}

// dP - delta becomes dS.
template <int kM, int kN>
__device__ __forceinline__ void multiply_by_p(float (&dp)[kM][kN][4], const float (&p)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i)
    dp[i / (4 * kN)][i / 4 % kN][i % 4] *= p[i / (4 * kN)][i / 4 % kN][i % 4];
}

}  // namespace flashsci::sm75::bwd
