// Forward attention with a bias whose heads lie side by side.
//
// Maths     S = scale Q K^T + bias, P = exp(S - max), O = P V / sum P, lse = max + log sum P.
// Roles     A cluster has kRows queries of some heads, and each of its CTAs every so many-th block of
//           keys. A warp has half of the queries, four heads, and of a stage kWarpRows keys.
//           At the end warps and CTAs add up what they have.
// Shared    Q; stages of K, V and bias, by TMA, then the parts of the output: `Storage` (config.cuh).
// Pipeline  As many blocks ahead as there are stages but one (pipeline.cuh); one barrier a stage.
// Limits    L2, and latency of a few blocks.
#pragma once
#include <cuda_runtime.h>
#include <cstddef>

#include "combine.cuh"
#include "pipeline.cuh"

namespace flashsci::sm90::pair {

template <class C>
struct ForwardRows {
  Sums<C> o;
  float row_max[kQuad][2], row_sum[kQuad][2];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int head = 0; head < kQuad; ++head) {
#pragma unroll
      for (int i = 0; i < C::kDim / 2; ++i) o[head][i / 4][i % 4] = 0.f;
      row_max[head][0] = row_max[head][1] = -INFINITY;
      row_sum[head][0] = row_sum[head][1] = 0.f;
    }
  }
  // A block of keys.
  __device__ __forceinline__ void step(uint32_t q, uint32_t stage, const Warp<C>& w,
                                       const ShownColumns& shown, float scale,
                                       uint32_t first_head) {
    using F = typename C::Format;
    float s[kQuad][2][4];  // the bias first, then scores, then P
    read_cells<C>(s, stage + offsetof(Stage<C>, cells), w, first_head);
#pragma unroll
    for (int head = 0; head < kQuad; ++head) {
      float product[2][4] = {};
      F::multiply_transposed(product, w.own_rows(q, head), w.block_rows(stage, head));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int n = i / 4, e = i % 4;
        const float score = fmaf(product[n][e], scale, s[head][n][e]);
        s[head][n][e] = shown(n, e) ? score : -INFINITY;
      }
    }
    online_softmax_lazily(s, o, row_max, row_sum, kLog2e);
#pragma unroll
    for (int head = 0; head < kQuad; ++head)
      F::multiply(o[head], s[head],
                  w.block_rows(stage + static_cast<uint32_t>(offsetof(Stage<C>, second)), head));
  }
  // What the warps of all splits have, in the first Partial; exponents relative to the largest
  // score.
  __device__ __forceinline__ void add_splits(Storage<C>& shared, const Warp<C>& w) {
    const auto statistics = [&](int split, int head, int half) -> float2& {
      return shared.partial[split].maximum_sum[w.quad * kQuad + head][w.row + half * 8 + w.group];
    };
    if (C::kSplits == 1 || w.split > 0) share_statistics(statistics, w.split, w);
    if (w.split > 0)
      for_places<C>(shared.partial[w.split], w, [&](int head, int half, int d, float2& place) {
        place = make_float2(o[head][d][half * 2], o[head][d][half * 2 + 1]);
      });
    __syncthreads();
    if (w.split > 0) return;
    float weight[C::kSplits][kQuad][2];
#pragma unroll
    for (int i = 0; i < kQuad * 2; ++i) {
      const int head = i / 2, half = i % 2;
      float maximum = row_max[head][half], sum = quad_sum(row_sum[head][half]);
      const float own = maximum;
#pragma unroll
      for (int split = 1; split < C::kSplits; ++split)
        maximum = fmaxf(maximum, statistics(split, head, half).x);
      weight[0][head][half] = weight_of(own, maximum);
      sum *= weight[0][head][half];
#pragma unroll
      for (int split = 1; split < C::kSplits; ++split) {
        const float2 theirs = statistics(split, head, half);
        weight[split][head][half] = weight_of(theirs.x, maximum);
        sum = fmaf(theirs.y, weight[split][head][half], sum);
      }
      if (w.lane == 0) statistics(0, head, half) = make_float2(maximum, sum);
    }
    for_places<C>(shared.partial[0], w, [&](int head, int half, int d, float2& place) {
      float2 x = make_float2(o[head][d][half * 2] * weight[0][head][half],
                             o[head][d][half * 2 + 1] * weight[0][head][half]);
      const auto offset = reinterpret_cast<unsigned char*>(&place) -
                          reinterpret_cast<unsigned char*>(&shared.partial[0]);
#pragma unroll
      for (int split = 1; split < C::kSplits; ++split) {
        const float2 theirs = *reinterpret_cast<const float2*>(
            reinterpret_cast<const unsigned char*>(&shared.partial[split]) + offset);
        x.x = fmaf(theirs.x, weight[split][head][half], x.x);
        x.y = fmaf(theirs.y, weight[split][head][half], x.y);
      }
      place = x;
    });
  }

 private:
  template <class Statistics>
  __device__ __forceinline__ void share_statistics(Statistics&& statistics, int split,
                                                   const Warp<C>& w) const {
#pragma unroll
    for (int i = 0; i < kQuad * 2; ++i) {
      const float sum = quad_sum(row_sum[i / 2][i % 2]);
      if (w.lane == 0) statistics(split, i / 2, i % 2) = make_float2(row_max[i / 2][i % 2], sum);
    }
  }
};

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ FlashsciForwardParams p,
                   const __grid_constant__ Plan plan, const __grid_constant__ Maps maps) {
  using Element = typename C::Format::Element;
  extern __shared__ unsigned char shared_memory[];
  auto& shared = start_storage<C>(shared_memory);
  const int rank = ptx::cluster_rank(), size = ptx::cluster_size();
  const Place<C> place(blockIdx.x / size, plan.query_tiles, p.heads_q, p.batch1);
  const Warp<C> w;
  const int first_query = place.tile * kRows;
  const uint32_t q = ptx::shared_address(shared.own[0]);
  if (threadIdx.x == 0) {
    const uint32_t barrier = ptx::shared_address(&shared.own_copied);
    ptx::mbarrier_arrive_expect(barrier, C::kBoxBytes);
    place.copy_box(q, maps.q, first_query, barrier);
  }
  const ShownKeys keys(p.bias_mask, place, p.seq_k);
  ForwardRows<C> rows;
  rows.reset();
  ShownColumns shown = keys.columns(rank * C::kBlock, w);
  for_blocks<C>(
      shared, p.seq_k, rank, size,
      [&](uint32_t stage, uint32_t barrier, int key) {
        copy_stage<C>(stage, barrier, place, maps.k, maps.v, maps.bias, key, first_query, 0);
      },
      [&](uint32_t stage, int key) {
        const ShownColumns next = keys.columns(key + size * C::kBlock, w);
        rows.step(q, stage, w, shown, p.scale, place.head);
        shown = next;
      });
  rows.add_splits(shared, w);
  ptx::cluster_sync();

  auto* out = place.template rows<Element>(p.out, p.out_strides);
  float* lse = p.lse + (int64_t{place.batch} * p.heads_q + place.head) * p.seq_q;
  for_sums<C>(
      shared,
      [&](int head, int row, int column, int size, float (&weight)[kMostCtas]) {
        const uint32_t at = ptx::shared_address(&shared.partial[0].maximum_sum[head][row]);
        float2 part[kMostCtas];
#pragma unroll
        for (int r = 0; r < kMostCtas; ++r)
          part[r] = ptx::ld_cluster_f2(ptx::map_shared(at, min(r, size - 1)));
        float maximum = part[0].x, sum = 0.f;
#pragma unroll
        for (int r = 1; r < kMostCtas; ++r) maximum = fmaxf(maximum, part[r].x);
#pragma unroll
        for (int r = 0; r < kMostCtas; ++r) {
          weight[r] = r < size ? weight_of(part[r].x, maximum) : 0.f;
          sum = fmaf(weight[r], part[r].y, sum);
        }
        const float inverse = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
        for (float& x : weight) x *= inverse;
        if (column == 0 && first_query + row < p.seq_q)
          lse[head * int64_t{p.seq_q} + first_query + row] =
              sum == 0.f ? -INFINITY : maximum + logf(sum);
      },
      [&](int head, int row, int column, const auto& sum) {
        if (first_query + row < p.seq_q && column < p.head_dim_v)
          C::Format::store(
              out + head * p.out_strides.head + (first_query + row) * p.out_strides.row + column,
              sum);
      });
  ptx::cluster_sync_relaxed();  // everybody has read
}

}  // namespace flashsci::sm90::pair
