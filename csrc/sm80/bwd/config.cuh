// What the backward kernels share: what the host derives from the parameters, places, and the
// workspace.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../core/mask.cuh"
#include "../../core/score_mod.cuh"
#include "../../core/smem_tile.cuh"
#include "../../core/tile_coord.cuh"
#include "../../core/varlen.cuh"
#include "../../include/flashsci.h"

namespace flashsci::sm80::bwd {

static_assert(std::is_trivially_copyable_v<FlashsciBackwardParams>, "passed to kernels by value");

struct BackwardPlan {
  // Workspace. statistics: [B0, B1, Hq, Sq] of (-lse in log2 units, -delta); (-inf, 0) where a row
  // sees no key. dq_sums: a tile of fp32 sums in fragment order for each slot of each query head.
  float2* statistics;
  float* dq_sums;
  float* bias_sums;      // [splits, elements of dbias], when the members are split
  int group;             // query heads of a key head
  uint32_t query_slots;  // query tiles of one query head in dq_sums
  int score_mode;        // ScoreMode: how raw q.k becomes what is exponentiated
  float score_inner;     // kLinear: s *= inner; kSoftcap: s = outer * tanh(inner * s)
  float score_outer;
  float exp_scale;    // log2(e) times what is left to multiply by
  float bias_factor;  // from natural units to those of s; kScaled only
  int bias_first;     // there is a bias, and scores can start from it
  int vector;         // q, k, v, dout rows take 16-byte copies
  int vector_dq, vector_dk, vector_dv;
  int bias_vector, mask_vector, dbias_vector;  // rows of four keys are aligned and whole
  int adds_dq;                                 // backward_kernel adds dq to dq_sums
  int writes_dq;    // backward_kernel writes dq: all keys are in its tile
  int writes_bias;  // backward_kernel writes dbias: it has a place for every pair
};

// S becomes softcap tanh(S / softcap); dP - delta takes the slope.
template <int kM, int kN>
__device__ __forceinline__ void apply_softcap(float (&s)[kM][kN][4], float (&dp)[kM][kN][4],
                                              const BackwardPlan& plan, bool slopes = true) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) {
    float& x = s[i / (4 * kN)][i / 4 % kN][i % 4];
    float slope;
    const float t = tanh_accurate(plan.score_inner * x, slope);
    x = plan.score_outer * t;
    if (slopes) dp[i / (4 * kN)][i / 4 % kN][i % 4] *= slope;
  }
}

template <int kM, int kN>
__device__ __forceinline__ void scale_linear(float (&s)[kM][kN][4], float factor) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) s[i / (4 * kN)][i / 4 % kN][i % 4] *= factor;
}

}  // namespace flashsci::sm80::bwd
