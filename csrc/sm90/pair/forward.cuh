// Forward attention in fp32 with a bias whose heads are neighbours in memory.
//
// Maths     S = scale Q K^T + bias, P = exp(S - max), O = P V / sum P, lse = max + log sum P.
// Roles     A cluster has kRows queries of kHeads heads; CTA r of n takes blocks of keys r, r + n,
//           ... A warp has half of the queries, of the heads and of the keys of a block. At the end
//           warps and CTAs add up their results.
// Shared    Q; stages of K, V and bias, then the partial outputs: `Storage` (config.cuh).
// Pipeline  TMA runs ahead by the number of stages minus one (pipeline.cuh); one barrier a block.
// Limits    Latency of a few blocks, and the sums of a cluster.
#pragma once
#include <cuda_runtime.h>

#include "combine.cuh"
#include "pipeline.cuh"
#include "products.cuh"

namespace flashsci::sm90::pair {

template <class C>
struct ForwardRows {
  static constexpr int kDim = C::kDim;
  Sums<kDim> o;
  float row_max[kQuad][2], row_sum[kQuad][2];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int head = 0; head < kQuad; ++head) {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) o[head][i / 4][i % 4] = 0.f;
      row_max[head][0] = row_max[head][1] = -INFINITY;
      row_sum[head][0] = row_sum[head][1] = 0.f;
    }
  }
  // A block of keys.
  __device__ __forceinline__ void step(uint32_t q, uint32_t stage, const Warp& w,
                                       const ShownColumns& shown, float scale) {
    constexpr uint32_t kV = offsetof(Stage<kDim>, second), kCells = offsetof(Stage<kDim>, cells);
    float s[kQuad][2][4];  // the bias first, then scores, then P
    read_cells(s, stage + kCells, w);
#pragma unroll
    for (int head = 0; head < kQuad; ++head) {
      float product[2][4] = {};
      multiply_transposed<kDim>(product, w.own_rows<kDim>(q, head),
                                w.block_rows<kDim>(stage, head));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int n = i / 4, e = i % 4;
        const float score = fmaf(product[n][e], scale, s[head][n][e]);
        s[head][n][e] = shown(n, e) ? score : -INFINITY;
      }
    }
    // All heads at a time: the compiler moves nothing across its branches.
    online_softmax_lazily(s, o, row_max, row_sum, kLog2e);
#pragma unroll
    for (int head = 0; head < kQuad; ++head)
      multiply<kDim>(o[head], s[head], w.block_rows<kDim>(stage + kV, head));
  }
  // Adds the results of both halves of the warps, in the first Partial.
  __device__ __forceinline__ void add_halves(Storage<C>& shared, const Warp& w) {
    const auto statistics = [&](int part, int head, int half) -> float2& {
      return shared.partial[part].maximum_sum[w.quad + head][w.row + half * 8 + w.group];
    };
    if (w.half == 1) {
#pragma unroll
      for (int i = 0; i < kQuad * 2; ++i) {
        const float sum = quad_sum(row_sum[i / 2][i % 2]);
        if (w.lane == 0) statistics(1, i / 2, i % 2) = make_float2(row_max[i / 2][i % 2], sum);
      }
      for_places(shared.partial[1], w, [&](int head, int half, int d, float2& place) {
        place = make_float2(o[head][d][half * 2], o[head][d][half * 2 + 1]);
      });
    }
    __syncthreads();
    if (w.half == 1) return;
    float own[kQuad][2], other[kQuad][2];  // factors of the halves
#pragma unroll
    for (int i = 0; i < kQuad * 2; ++i) {
      const int head = i / 2, half = i % 2;
      const float2 theirs = statistics(1, head, half);
      const float maximum = fmaxf(row_max[head][half], theirs.x);
      own[head][half] = weight_of(row_max[head][half], maximum);
      other[head][half] = weight_of(theirs.x, maximum);
      const float sum = quad_sum(row_sum[head][half]) * own[head][half];
      if (w.lane == 0)
        statistics(0, head, half) = make_float2(maximum, fmaf(theirs.y, other[head][half], sum));
    }
    for_places(shared.partial[1], w, [&](int head, int half, int d, float2& place) {
      float (&x)[4] = o[head][d];
      x[half * 2] = fmaf(place.x, other[head][half], x[half * 2] * own[head][half]);
      x[half * 2 + 1] = fmaf(place.y, other[head][half], x[half * 2 + 1] * own[head][half]);
    });
    for_places(shared.partial[0], w, [&](int head, int half, int d, float2& place) {
      place = make_float2(o[head][d][half * 2], o[head][d][half * 2 + 1]);
    });
  }
};

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ FlashsciForwardParams p,
                   const __grid_constant__ Plan plan, const __grid_constant__ Maps maps) {
  extern __shared__ unsigned char shared_memory[];
  auto& shared = start_storage<C>(shared_memory);
  const int rank = ptx::cluster_rank(), size = ptx::cluster_size();
  const Place place(blockIdx.x / size, plan.query_tiles, p.heads_q, p.batch1);
  const Warp w;
  const int first_query = place.tile * kRows;
  const uint32_t q = ptx::shared_address(shared.own[0]);
  if (threadIdx.x == 0) {
    const uint32_t barrier = ptx::shared_address(&shared.own_copied);
    ptx::mbarrier_arrive_expect(barrier, sizeof(shared.own));
    place.copy_box(q, maps.q, first_query, barrier);
  }
  const ShownKeys keys(p.bias_mask, place, p.seq_k);
  ForwardRows<C> rows;
  rows.reset();
  ShownColumns shown = keys.columns(rank * kRows, w);
  for_blocks(
      shared, p.seq_k, rank, size,
      [&](uint32_t stage, uint32_t barrier, int key) {
        copy_stage<C::kDim>(stage, barrier, place, maps.k, maps.v, maps.bias, key, first_query, 0);
      },
      [&](uint32_t stage, int key) {
        const ShownColumns next = keys.columns(key + size * kRows, w);
        rows.step(q, stage, w, shown, p.scale);
        shown = next;
      });
  rows.add_halves(shared, w);
  ptx::cluster_sync();

  float* out = place.rows(p.out, p.out_strides);
  float* lse = p.lse + (int64_t{place.batch} * p.heads_q + place.head) * p.seq_q;
  for_sums(
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
      [&](int head, int row, int column, const float4& sum) {
        if (first_query + row < p.seq_q && column < p.head_dim_v)
          *reinterpret_cast<float4*>(out + head * p.out_strides.head +
                                     (first_query + row) * p.out_strides.row + column) = sum;
      });
  ptx::cluster_sync_relaxed();  // all CTAs have read
}

}  // namespace flashsci::sm90::pair
