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

template <int kM, int kN>
__device__ __forceinline__ void scale_scores(float (&s)[kM][kN][4], const ScorePlan& plan) {
  if (plan.mode == kSoftcap) {
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) {
      float& x = s[i / (4 * kN)][i / 4 % kN][i % 4];
      x = plan.outer * tanh_accurate(plan.inner * x);
    }
  } else if (plan.mode == kLinear) {
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) s[i / (4 * kN)][i / 4 % kN][i % 4] *= plan.inner;
  }
}

}  // namespace flashsci
