// Attention of short sequences: each warp has a whole head.
//
// Maths     S = scale Q K^T (+ bias or log of key weights, masked), P = exp(S - max), O = P V / sum; lse = max + log(sum)
// Roles     The warps of a block have neighbouring heads and are independent of each other
// Shared    None: operands go from memory to registers in the order of products (fragments.cuh);
//           kStaged: through shared memory, and results of 32 short rows as well (staging.cuh)
// Pipeline  None: other warps compute while one waits for its rows; kStaged: V comes after Q and K
// Limits    Memory
#pragma once
#include "scores.cuh"
#include "staging.cuh"

namespace flashsci::sm80::small {

// Rows, Out: HeadRows or StagedRows. wait(): waits for V.
template <class P, class S, class Rows, class Out, class Wait>
__device__ __forceinline__ void attend(const FlashsciForwardParams& p, const Head& place,
                                       const LaneRows& queries, const Rows& q, const Rows& k,
                                       const Rows& v, const Out& out, bool plain, Wait&& wait) {
  constexpr int kBlocks = S::kBlocks;
  Scores<kBlocks> s;
  // The part of V that fits registers is loaded while scores are computed.
  constexpr int kEarly = Rows::kShared ? 0 : kHoldsRows<P, S> ? S::kUnits : 1;
  typename P::Row values[kEarly > 0 ? kEarly : 1][kBlocks];
  multiply_heads<P, S, S::kUnits>(s, q, k, [&] {
#pragma unroll
    for (int u = 0; u < kEarly; ++u) v.load(values[u], u);
  });
  const float unit = finish_scores<P, false>(s, p, place, plain);

  float inverse[kBlocks];  // inverse sums of rows g of each block
  const int t = threadIdx.x % 4;
  float own_sum = 0.f, own_reference = 0.f;  // of row 8 t + g, whose lse this lane stores
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    auto& tile = s[i / 2];
    const float maximum = quad_max(lane_max(tile, i % 2));
    const float reference = maximum == -INFINITY ? 0.f : maximum;  // a row without keys
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < kBlocks * 2; ++j) {
      float& x = tile[j / 2][i % 2 * 2 + j % 2];
      x = ptx::ex2_approx((x - reference) * (unit * kLog2e));
      sum += x;
    }
    sum = quad_sum(sum);
    inverse[i] = sum == 0.f ? 0.f : ptx::rcp_approx(sum);
    if (t == i) own_sum = sum, own_reference = reference;
  }
  if (const int row = t * 8 + queries.first; row < p.seq_q)
    p.lse[static_cast<int64_t>(place.index) * p.seq_q + row] =
        own_sum == 0.f ? -INFINITY : fmaf(ptx::lg2_approx(own_sum), kLn2, own_reference * unit);

  const typename P::template Left<kBlocks> probabilities(s);
  wait();
#pragma unroll
  for (int u = 0; u < S::kUnits; ++u) {
    if (u >= kEarly) v.load(values[0], u);
    typename P::Sum o[S::kTiles][2];
    P::template multiply<kBlocks>(o, probabilities, values[u < kEarly ? u : 0]);
    out.store(o, u, [&](int i) { return inverse[i]; });
  }
}

// kRoom: as in the backward.
template <class P, class S, bool kStaged, int kRoom>
__global__ void __launch_bounds__(P::forward_threads(S::kBlocks, S::kUnits).of_block,
                                  P::forward_threads(S::kBlocks, S::kUnits).blocks)
    small_forward_kernel(const __grid_constant__ FlashsciForwardParams p,
                         const __grid_constant__ HeadPlan plan) {
  const uint32_t warp = threadIdx.x / 32, first = blockIdx.x * (blockDim.x / 32);
  if (!kStaged && first + warp >= plan.count) return;
  const Head first_head(plan, kStaged ? first : first + warp);
  const Head place = kStaged ? first_head.next(warp) : first_head;
  const LaneRows queries(p.seq_q), keys(p.seq_k);
  using Rows = HeadRows<P, S>;
  const auto out = [&] {
    return Rows(p.out, plan.of[kOut], place, place.head, queries, p.head_dim_v);
  };
  if constexpr (kStaged) {
    const Stage<P, S, kOfForward, kRoom> stage(plan, first_head);
    const auto fetch = [&](auto same_strides) {
      constexpr bool kSameStrides = decltype(same_strides)::value;
      auto at = stage.offsets(kQ);
      stage.fetch(at, kQ, p.q, p.seq_q);
      stage.template fetch_next<kSameStrides>(at, kK, p.k, p.seq_k);
      ptx::cp_async_commit();
      stage.template fetch_next<kSameStrides>(at, kV, p.v, p.seq_k);
      ptx::cp_async_commit();
    };
    if (stage.kOwn || kRoom > 0 || plan.same_strides)
      fetch(std::true_type{});
    else
      fetch(std::false_type{});
    stage.template wait<1>();
    const auto attend_to = [&](const auto& results) {
      attend<P, S>(p, place, queries, stage.rows_of(kQ, queries), stage.rows_of(kK, keys),
                   stage.rows_of(kV, keys), results, plan.plain, [&] { stage.template wait<0>(); });
    };
    if constexpr (kStagesResults<P, S, kOfForward>) {
      attend_to(stage.rows_of(place_of(kOut), queries));
      __syncthreads();
      stage.release(stage.offsets(kOut), kOut, p.out, p.seq_q);
    } else {
      attend_to(out());
    }
  } else {
    attend<P, S>(p, place, queries, Rows(p.q, plan.of[kQ], place, place.head, queries, p.head_dim),
                 Rows(p.k, plan.of[kK], place, place.head_k, keys, p.head_dim),
                 Rows(p.v, plan.of[kV], place, place.head_k, keys, p.head_dim_v), out(), plan.plain,
                 [] {});
  }
}

}  // namespace flashsci::sm80::small
