// From raw products q.k to exponents: scale, softcap, and the units of the running maximum.
#pragma once
#include "softmax.cuh"

namespace flashsci {

enum ScoreMode { kScaled = 0, kLinear = 1, kSoftcap = 2 };

// The constants that the host derives once from scale and softcap.
struct ScorePlan {
  int mode;     // kScaled: s = q.k, the scale (> 0) is part of exp_scale
  float inner;  // kLinear: s = inner * q.k; kSoftcap: s = outer * tanh(inner * q.k)
  float outer;
  float exp_scale;  // log2(e) times the remaining factor
};

// folds: the exponential may take the scale. It may not where the scale is negative, nor where
// terms in natural units are added to s.
inline ScorePlan plan_scores(float scale, float softcap, bool folds) {
  ScorePlan plan;
  plan.mode = softcap != 0.f ? kSoftcap : folds ? kScaled : kLinear;
  plan.inner = softcap != 0.f ? scale / softcap : scale;
  plan.outer = softcap;
  plan.exp_scale = plan.mode == kScaled ? scale * kLog2e : kLog2e;
  return plan;
}

// The constants of a call. A softcap that bounds the bias, too, takes scores in natural units.
template <class Params>
inline ScorePlan plan_scores_of(const Params& p, bool folds) {
  return plan_scores(p.bias_mask.capped ? 1.f : p.scale, p.softcap, folds);
}

// From the units of s to natural log.
inline float lse_scale_of(const ScorePlan& plan, float scale) {
  return plan.mode == kScaled ? scale : 1.f;
}

// The scaling of scores that are not kScaled, in the accumulators of wgmma.
template <int kCount>
__device__ __forceinline__ void scale_scores(float (&s)[kCount], const ScorePlan& plan) {
  if (plan.mode == kSoftcap) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] = plan.outer * tanh_accurate(plan.inner * s[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] *= plan.inner;
  }
}

// The same in the accumulators of mma.
template <int kM, int kN>
__device__ __forceinline__ void scale_scores(float (&s)[kM][kN][4], const ScorePlan& plan) {
  if (plan.mode == kSoftcap) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[m][n][e] = plan.outer * tanh_accurate(plan.inner * s[m][n][e]);
  } else {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] *= plan.inner;
  }
}

template <int kM, int kN>
__device__ __forceinline__ void scale(float (&s)[kM][kN][4], float factor) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) s[i / (4 * kN)][i / 4 % kN][i % 4] *= factor;
}

// For the backward: the argument of the exponential, from q.k; dP - delta is multiplied by the
// slope of a softcap. hides: scores of -inf, from a bias that the softcap bounds, stay.
template <int kM, int kN>
__device__ __forceinline__ void modify_scores(float (&s)[kM][kN][4], float (&dp)[kM][kN][4],
                                              const ScorePlan& plan, bool slopes = true,
                                              bool hides = false) {
  if (plan.mode == kSoftcap) {
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) {
      float& x = s[i / (4 * kN)][i / 4 % kN][i % 4];
      float slope;
      const float t = tanh_accurate(plan.inner * x, slope);
      x = hides && x == -INFINITY ? x : plan.outer * t;
      if (slopes) dp[i / (4 * kN)][i / 4 % kN][i % 4] *= slope;
    }
  } else if (plan.mode == kLinear) {
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) s[i / (4 * kN)][i / 4 % kN][i % 4] *= plan.inner;
  }
}

}  // namespace flashsci
