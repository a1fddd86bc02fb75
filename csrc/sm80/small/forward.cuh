// Attention of short sequences: a warp has a whole head.
//
// Maths     S = scale Q K^T (+ bias, masked), P = exp(S - max), O = P V / sum; lse = max + log(sum)
// Roles     warps of a block have neighbouring heads and know nothing of each other
// Shared    none: operands go from memory to registers as products want them (fragments.cuh)
// Pipeline  none: other warps compute while one waits for its rows
// Limits    memory
#pragma once
#include "scores.cuh"

namespace flashsci::sm80::small {

template <class P, class S>
__device__ __forceinline__ void attend(const FlashsciForwardParams& p, const Head& place) {
  constexpr int kBlocks = S::kBlocks;
  const LaneRows queries(p.seq_q), keys(p.seq_k);
  const HeadRows<P, S> q(p.q, p.q_strides, place, place.head, queries, p.head_dim);
  const HeadRows<P, S> k(p.k, p.k_strides, place, place.head_k, keys, p.head_dim);
  const HeadRows<P, S> v(p.v, p.v_strides, place, place.head_k, keys, p.head_dim_v);
  const HeadRows<P, S> out(p.out, p.out_strides, place, place.head, queries, p.head_dim_v);

  Scores<kBlocks> s;
  // What registers hold of V is on its way while scores are computed.
  constexpr int kEarly = kHoldsRows<P, S> ? S::kUnits : 1;
  typename P::Row values[kEarly][kBlocks];
  multiply_heads<S::kUnits>(s, q, k, [&] {
#pragma unroll
    for (int u = 0; u < kEarly; ++u) v.load(values[u], u);
  });
  finish_scores<P, false>(s, p, place);

  float inverse[kBlocks];  // of the sums of rows g of each block
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    auto& tile = s[i / 2];
    const float maximum = quad_max(lane_max(tile, i % 2));
    const float reference = maximum == -INFINITY ? 0.f : maximum;  // a row without keys
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < kBlocks * 2; ++j) {
      float& x = tile[j / 2][i % 2 * 2 + j % 2];
      x = ptx::ex2_approx((x - reference) * kLog2e);
      sum += x;
    }
    sum = quad_sum(sum);
    inverse[i] = sum == 0.f ? 0.f : 1.f / sum;
    if (threadIdx.x % 4 == 0 && queries.has(i))
      p.lse[static_cast<int64_t>(place.index) * p.seq_q + queries.first + i * 8] =
          sum == 0.f ? -INFINITY : fmaf(ptx::lg2_approx(sum), kLn2, reference);
  }

  const typename P::template Left<kBlocks> probabilities(s);
#pragma unroll
  for (int u = 0; u < S::kUnits; ++u) {
    if (u >= kEarly) v.load(values[0], u);
    typename P::Sum o[S::kTiles][2];
    P::template multiply<kBlocks>(o, probabilities, values[u < kEarly ? u : 0]);
    out.store(o, u, [&](int i) { return inverse[i]; });
  }
}

template <class P, class S>
__global__ void __launch_bounds__(P::forward_threads(S::kBlocks, S::kUnits))
    small_forward_kernel(const __grid_constant__ FlashsciForwardParams p,
                         const __grid_constant__ HeadPlan plan) {
  const uint32_t index = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (index < plan.count) attend<P, S>(p, Head(plan, index));
}

}  // namespace flashsci::sm80::small
