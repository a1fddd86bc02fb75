// The gradients of attention in fp32 with a bias whose heads are neighbours in memory.
//
// Maths     P = exp(scale Q K^T + bias - lse), dP = dO V^T, dS = P (dP - delta): dbias = dS,
//           dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO.
// Roles     Two kinds of clusters in one launch, each with kRows rows of some heads. Those of
//           queries go through blocks of keys as in forward.cuh, for dQ and dbias; those of keys
//           through blocks of queries, for dK and dV. So S and dP are computed twice, and no sums
//           are made in global memory: results are the same from run to run.
// Shared    Q and dO, or K and V; stages of the others, bias and statistics, then the partial sums
//           of a gradient: `Storage` (config.cuh).
// Pipeline  As in forward.cuh; TMA stores dS from the place of its bias.
// Limits    As in forward.cuh.
#pragma once
#include <cuda_runtime.h>
#include <cstddef>

#include "../../ptx/bulk.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/fence.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "combine.cuh"
#include "pipeline.cuh"
#include "products.cuh"

namespace flashsci::sm90::pair {

template <class C>
struct BackwardBlock {
  static constexpr int kDim = C::kDim;
  using Scores = float[2][4];
  static constexpr uint32_t kSecond = offsetof(Stage<kDim>, second);
  static constexpr uint32_t kCells = offsetof(Stage<kDim>, cells);
  static constexpr uint32_t kStatistics = offsetof(Stage<kDim>, statistics);

  const FlashsciBackwardParams& p;
  const Plan& plan;
  const Maps& maps;
  Storage<C>& shared;
  const Place place;
  const Warp w;
  const int rank = ptx::cluster_rank(), size = ptx::cluster_size();
  const ShownKeys keys{p.bias_mask, place, p.seq_k};
  const uint32_t own = ptx::shared_address(shared.own[0]);

  __device__ __forceinline__ BackwardBlock(const FlashsciBackwardParams& p, const Plan& plan,
                                           const Maps& maps, Storage<C>& shared, uint32_t cluster,
                                           uint32_t tiles)
      : p(p), plan(plan), maps(maps), shared(shared), place(cluster, tiles, p.heads_q, p.batch1) {}

  // The CTA's own data: rows from `row` on of two tensors.
  __device__ __forceinline__ void copy_own(const CUtensorMap& first, const CUtensorMap& second,
                                           int row) const {
    if (threadIdx.x != 0) return;
    const uint32_t barrier = ptx::shared_address(&shared.own_copied);
    ptx::mbarrier_arrive_expect(barrier, sizeof(shared.own));
    place.copy_box(own, first, row, barrier);
    place.copy_box(own + C::kBoxBytes, second, row, barrier);
  }
  static __device__ __forceinline__ float probability(float s, float scale, float bias,
                                                      float negated_lse, bool shown) {
    return shown ? ptx::ex2_approx(fmaf(fmaf(s, scale, bias), kLog2e, negated_lse)) : 0.f;
  }

  // dQ and dbias of a tile of queries.
  __device__ __forceinline__ void run_queries() {
    const int first_query = place.tile * kRows;
    const uint32_t dout = own + C::kBoxBytes;
    copy_own(maps.q, maps.dout, first_query);
    ptx::wait_for_prerequisites();
    const float2* statistics =
        plan.statistics + (int64_t{place.batch} * p.heads_q + place.head) * plan.statistics_rows;
    float2 of_row[kQuad][2];
    bool large = false;
#pragma unroll
    for (int i = 0; i < kQuad * 2; ++i) {
      const int row = first_query + w.row + i % 2 * 8 + w.group;
      of_row[i / 2][i % 2] = row < p.seq_q
                                 ? statistics[(w.quad + i / 2) * plan.statistics_rows + row]
                                 : make_float2(-INFINITY, 0.f);
      large |= is_large(of_row[i / 2][i % 2].x);
    }
    large = __any_sync(0xffffffffu, large);
    Sums<kDim> dq = {};
    ShownColumns shown = keys.columns(rank * kRows, w);
    for_blocks(
        shared, p.seq_k, rank, size,
        [&](uint32_t stage, uint32_t barrier, int key) {
          copy_stage<kDim>(stage, barrier, place, maps.k, maps.v, maps.bias, key, first_query, 0);
        },
        [&](uint32_t stage, int key) {
          const ShownColumns next = keys.columns(key + size * kRows, w);
          float s[kQuad][2][4];  // the bias first, then P, then dS
          read_cells(s, stage + kCells, w);
#pragma unroll
          for (int head = 0; head < kQuad; ++head) {
            Scores product = {};
            multiply_transposed<kDim>(product, w.own_rows<kDim>(own, head),
                                      w.block_rows<kDim>(stage, head));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              const int n = i / 4, e = i % 4;
              s[head][n][e] = probability(product[n][e], p.scale, s[head][n][e],
                                          of_row[head][e / 2].x, shown(n, e));
            }
          }
          if (large) limit_probabilities(s);
#pragma unroll
          for (int head = 0; head < kQuad; ++head) {
            Scores dp = {};
            multiply_transposed<kDim>(dp, w.own_rows<kDim>(dout, head),
                                      w.block_rows<kDim>(stage + kSecond, head));
#pragma unroll
            for (int i = 0; i < 8; ++i)
              s[head][i / 4][i % 4] *= dp[i / 4][i % 4] + of_row[head][i % 4 / 2].y;
            multiply<kDim>(dq[head], s[head], w.block_rows<kDim>(stage, head));
          }
          if (p.dbias != nullptr) {  // from the place of the bias
            write_cells(s, stage + kCells, w);
            ptx::fence_proxy_async();
            __syncthreads();
            if (threadIdx.x == 0) {
              ptx::tma_store_5d(&maps.dbias, stage + kCells, place.head, key, first_query,
                                place.batch1, place.batch0);
              ptx::bulk_commit();
            }
          }
          shown = next;
        });
    if (p.dq != nullptr)
      write_gradient(shared, dq, w, p.scale, place.rows(p.dq, p.dq_strides), p.dq_strides,
                     first_query, p.seq_q, p.head_dim);
  }

  // dK and dV of a tile of keys.
  __device__ __forceinline__ void run_keys() {
    const int first_key = place.tile * kRows;
    const uint32_t v = own + C::kBoxBytes;
    copy_own(maps.k, maps.v, first_key);
    ptx::wait_for_prerequisites();
    ptx::fence_proxy_async_global();  // statistics are read by copies
    const float2* statistics =
        plan.statistics + (int64_t{place.batch} * p.heads_q + place.head) * plan.statistics_rows;
    const uint8_t shown[2] = {keys(first_key + w.row + w.group),
                              keys(first_key + w.row + w.group + 8)};
    Sums<kDim> dk = {}, dv = {};
    for_blocks(
        shared, p.seq_q, rank, size,
        [&](uint32_t stage, uint32_t barrier, int query) {
          copy_stage<kDim>(stage, barrier, place, maps.q, maps.dout, maps.bias_of_keys, query,
                           first_key, sizeof(Stage<kDim>::statistics));
#pragma unroll
          for (int head = 0; head < kHeads; ++head)
            ptx::bulk_load(stage + kStatistics + head * kRows * 8,
                           statistics + head * plan.statistics_rows + query, kRows * 8, barrier);
        },
        [&](uint32_t stage, int) {
          float s[kQuad][2][4], negated_delta[kQuad][2][2];  // the bias first, then P, then dS
          read_cells(s, stage + kCells, w);
          const uint32_t dout = stage + kSecond;
          bool large = false;
#pragma unroll
          for (int head = 0; head < kQuad; ++head) {
            Scores product = {};
            multiply_transposed<kDim>(product, w.own_rows<kDim>(own, head),
                                      w.block_rows<kDim>(stage, head));
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const int column = (w.quad + head) * kRows + w.column(n, 0);
              const uint4 x = ptx::ld_shared_v4(stage + kStatistics +
                                                column * static_cast<uint32_t>(sizeof(float2)));
              const float negated_lse[2] = {__uint_as_float(x.x), __uint_as_float(x.z)};
              negated_delta[head][n][0] = __uint_as_float(x.y);
              negated_delta[head][n][1] = __uint_as_float(x.w);
              large |= is_large(negated_lse[0]) || is_large(negated_lse[1]);
#pragma unroll
              for (int e = 0; e < 4; ++e)
                s[head][n][e] = probability(product[n][e], p.scale, s[head][n][e],
                                            negated_lse[e % 2], shown[e / 2] != 0);
            }
          }
          if (__any_sync(0xffffffffu, large)) limit_probabilities(s);
#pragma unroll
          for (int head = 0; head < kQuad; ++head) {
            multiply<kDim>(dv[head], s[head], w.block_rows<kDim>(dout, head));
            Scores dp = {};
            multiply_transposed<kDim>(dp, w.own_rows<kDim>(v, head),
                                      w.block_rows<kDim>(dout, head));
#pragma unroll
            for (int i = 0; i < 8; ++i)
              s[head][i / 4][i % 4] *= dp[i / 4][i % 4] + negated_delta[head][i / 4][i % 2];
            multiply<kDim>(dk[head], s[head], w.block_rows<kDim>(stage, head));
          }
        });
    if (p.dk != nullptr)
      write_gradient(shared, dk, w, p.scale, place.rows(p.dk, p.dk_strides), p.dk_strides,
                     first_key, p.seq_k, p.head_dim);
    if (p.dv != nullptr)
      write_gradient(shared, dv, w, 1.f, place.rows(p.dv, p.dv_strides), p.dv_strides, first_key,
                     p.seq_k, p.head_dim_v);
  }
};

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ FlashsciBackwardParams p,
                    const __grid_constant__ Plan plan, const __grid_constant__ Maps maps) {
  extern __shared__ unsigned char shared_memory[];
  auto& shared = start_storage<C>(shared_memory);
  const auto work = [&](uint32_t cluster, uint32_t tiles) {
    return BackwardBlock<C>(p, plan, maps, shared, cluster, tiles);
  };
  const uint32_t cluster = blockIdx.x / ptx::cluster_size();
  if (cluster < plan.query_clusters) {
    work(cluster, plan.query_tiles).run_queries();
    return;
  }
  work(cluster - plan.query_clusters, plan.key_tiles).run_keys();
}

}  // namespace flashsci::sm90::pair
