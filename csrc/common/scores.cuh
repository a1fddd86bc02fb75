// From raw products q.k to what is exponentiated: scale, softcap, and in which units the running
// maximum is kept.
#pragma once
#include "softmax.cuh"

namespace flashsci {

enum ScoreMode { kScaled = 0, kLinear = 1, kSoftcap = 2 };

// What the host derives from scale and softcap, once.
struct ScorePlan {
  int mode;     // kScaled: s = q.k, the scale (> 0) is part of exp_scale
  float inner;  // kLinear: s = inner * q.k; kSoftcap: s = outer * tanh(inner * q.k)
  float outer;
  float exp_scale;  // log2(e) times what is left to multiply by
  float lse_scale;  // from the units of s to natural log
};

// natural: s must be in units of the natural exponent, because something is added to it.
inline ScorePlan plan_scores(float scale, float softcap, bool natural) {
  ScorePlan plan;
  plan.mode = softcap != 0.f ? kSoftcap : scale > 0.f && !natural ? kScaled : kLinear;
  plan.inner = softcap != 0.f ? scale / softcap : scale;
  plan.outer = softcap;
  plan.exp_scale = plan.mode == kScaled ? scale * kLog2e : kLog2e;
  plan.lse_scale = plan.mode == kScaled ? scale : 1.f;
  return plan;
}

// slope(m, n, e, x) is called with the slope of the softcap at each score.
template <int kM, int kN, class Slope>
__device__ __forceinline__ void scale_scores(float (&s)[kM][kN][4], const ScorePlan& plan,
                                             const Slope& slope) {
  if (plan.mode == kSoftcap) {
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) {
      const int m = i / (4 * kN), n = i / 4 % kN, e = i % 4;
      const float t = tanh_accurate(plan.inner * s[m][n][e]);
      s[m][n][e] = plan.outer * t;
      slope(m, n, e, fmaf(-t, t, 1.f));
    }
  } else if (plan.mode == kLinear) {
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) s[i / (4 * kN)][i / 4 % kN][i % 4] *= plan.inner;
  }
}

template <int kM, int kN>
__device__ __forceinline__ void scale_scores(float (&s)[kM][kN][4], const ScorePlan& plan) {
  scale_scores(s, plan, [](int, int, int, float) {});
}

}  // namespace flashsci
