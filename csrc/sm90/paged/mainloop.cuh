// The computing warpgroup of paged attention.
#pragma once
#include <cstdint>

#include "../../ptx/cp_async.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/redux.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../../ptx/wgmma.cuh"
#include "../fwd/softmax.cuh"
#include "config.cuh"

namespace flashsci::sm90::paged {

using fwd::RowStatistics, fwd::kUninitializedMax, fwd::softmax_next;

enum NamedBarrier { kComputing = 1 };  // 0 is __syncthreads
inline constexpr int kComputingThreads = 128;

// lse in powers of two of a row and one more logit, and what the output is multiplied by.
__device__ __forceinline__ float2 with_logit(float lse, float logit) {
  const float top = fmaxf(lse, logit);
  if (top == -INFINITY) return make_float2(-INFINITY, 0.f);
  const float own = ptx::ex2_approx(lse - top), sum = own + ptx::ex2_approx(logit - top);
  return make_float2(top + ptx::lg2_approx(sum), own / sum);
}

// One slot and head: its rows, and what a thread carries through its blocks of keys.
template <class Op, class C>
struct Piece {
  using MmaQK = typename Op::template Wgmma<C::kBlockK>;
  using MmaPV = typename Op::template Wgmma<C::kHeadDim>;
  static constexpr int kBlockK = C::kBlockK, kHeadDim = C::kHeadDim;

  Storage<C>& shared;
  const Args& a;
  const Tile tile;
  const Window window;
  const uint32_t q_tile;         // its place in shared memory
  const int rows;                // of the tile
  const int row;                 // this lane's first
  const bool busy;               // the warp has rows
  const int query[2];            // of this lane's two rows
  const int first_key, end_key;  // that some row sees

  RowStatistics statistics;
  float o[kHeadDim / 2];

  __device__ __forceinline__ Piece(Storage<C>& shared_, const Args& a_, uint32_t stage)
      : shared(shared_),
        a(a_),
        tile(shared.tiles[stage]),
        window(a.p.window_left, a.p.window_right, true, tile.slot.seq_q, tile.slot.seq_k),
        q_tile(ptx::shared_address(shared.q[stage])),
        rows(min(kRows, tile.slot.seq_q * a.group - tile.slot.first_row)),
        row(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4),
        busy(ptx::redux_max(threadIdx.x / 32 * 16) < rows),
        query{query_of(row), query_of(row + 8)},
        first_key(window.begin(query_of(0))),
        end_key(window.end(query_of(rows - 1))),
        statistics{{kUninitializedMax, kUninitializedMax}, {0.f, 0.f}} {
#pragma unroll
    for (int e = 0; e < kHeadDim / 2; ++e) o[e] = 0.f;
  }

  // Row r of the tile is a query and one of the heads that share K and V; rows past the last are as
  // that one.
  __device__ __forceinline__ int pair_of(int r) const {
    return tile.slot.first_row + min(r, rows - 1);
  }
  __device__ __forceinline__ int query_of(int r) const { return pair_of(r) / a.group; }
  __device__ __forceinline__ int token_of(int r) const { return tile.slot.first_q + query_of(r); }
  __device__ __forceinline__ int head_of(int r) const {
    return tile.head * a.group + pair_of(r) % a.group;
  }

  __device__ __forceinline__ void score(float (&s)[kBlockK / 2], uint32_t stage) const {
    const uint64_t q_desc = ptx::wgmma_descriptor(q_tile, 16, 1024);
    const uint64_t k_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.k[stage]), 16, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d)
      MmaQK::template ss<0>(s, q_desc + (d / 4 * kRows * 128 + d % 4 * 32) / 16,
                            k_desc + (d / 4 * kBlockK * 128 + d % 4 * 32) / 16, d > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(s);
  }

  // Scores of the keys from `key` on become P.
  __device__ __forceinline__ void exponentiate(float (&s)[kBlockK / 2], int key) {
    if (a.scores.mode != kScaled) scale_scores(s, a.scores);
    const bool all_seen =
        key >= window.begin(query_of(rows - 1)) && key + kBlockK <= window.end(query_of(0));
    if (!all_seen) {
#pragma unroll
      for (int e = 0; e < kBlockK / 2; ++e) {
        const int i = query[e >> 1 & 1], j = key + e / 4 * 8 + threadIdx.x % 4 * 2 + (e & 1);
        if (j < window.begin(i) || j >= window.end(i)) s[e] = -INFINITY;
      }
    }
    float alpha[2] = {1.f, 1.f};
    if (softmax_next(s, statistics, alpha, a.scores.exp_scale)) {
#pragma unroll
      for (int e = 0; e < kHeadDim / 2; ++e) o[e] *= alpha[e >> 1 & 1];
    }
  }

  // Values of keys that no row sees may be anything, and 0 times that must be 0.
  __device__ __forceinline__ void clear_values(uint32_t stage, int key) const {
    if (key >= first_key && key + kBlockK <= end_key) return;
    constexpr int kChunks = kHeadDim / 8;
#pragma unroll 1
    for (int i = threadIdx.x; i < kBlockK * kChunks; i += kComputingThreads) {
      const int j = i / kChunks, chunk = i % kChunks;
      if (key + j < first_key || key + j >= end_key)
        ptx::st_shared(ptx::shared_address(shared.v[stage]) + chunk / 8 * (kBlockK * 128) +
                           j * 128 + chunk % 8 * 16,
                       make_uint4(0, 0, 0, 0));
    }
    ptx::fence_proxy_async();
    ptx::barrier_sync(kComputing, kComputingThreads);
  }

  __device__ __forceinline__ void add_values(const float (&s)[kBlockK / 2], uint32_t stage) {
    const uint64_t v_desc =
        ptx::wgmma_descriptor(ptx::shared_address(shared.v[stage]), kBlockK * 128, 1024);
    uint32_t p[kBlockK / 16][4];
#pragma unroll
    for (int e = 0; e < kBlockK / 2; e += 2)
      p[e / 8][e / 2 % 4] = busy ? Op::pack2(s[e], s[e + 1]) : 0u;
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kBlockK / 16; ++n) MmaPV::template rs<1>(o, p[n], v_desc + n * 128, 1);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(o);
  }

  __device__ __forceinline__ void release(uint64_t& barrier) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  }

  __device__ __forceinline__ void run(uint32_t& turn) {
#pragma unroll 1
    for (int block = tile.block; block < tile.last; ++block, ++turn) {
      const uint32_t stage = turn % C::kStages, parity = turn / C::kStages & 1;
      const int key = (tile.slot.first_block + block) * kBlockK;
      float s[kBlockK / 2];
      ptx::mbarrier_wait(ptx::shared_address(&shared.k_full[stage]), parity);
      score(s, stage);
      release(shared.k_empty[stage]);
      if (busy) exponentiate(s, key);
      ptx::mbarrier_wait(ptx::shared_address(&shared.v_full[stage]), parity);
      clear_values(stage, key);
      add_values(s, stage);
      release(shared.v_empty[stage]);
    }
  }

  // A whole piece to out and lse, another to the workspace.
  __device__ __forceinline__ void write(bool whole, int64_t piece) const {
    const int columns = threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 8 * half;
      const float sum = quad_sum(statistics.sum[half]);
      float factor = sum == 0.f ? 0.f : ptx::rcp_approx(sum);
      float lse = sum == 0.f ? -INFINITY : statistics.row_max_log2[half] + ptx::lg2_approx(sum);
      if (r >= rows) continue;
      if (whole) {
        const int token = token_of(r), head = head_of(r);
        if (a.p.sink != nullptr) {
          const float2 both = with_logit(lse, __ldg(a.p.sink + head) * kLog2e);
          lse = both.x, factor *= both.y;
        }
        auto* out = static_cast<uint16_t*>(a.p.out) + token * a.p.out_row + head * a.p.out_head;
#pragma unroll
        for (int e = half * 2; e < kHeadDim / 2; e += 4)
          if (e / 4 * 8 + columns < a.p.head_dim_v)
            *reinterpret_cast<uint32_t*>(out + e / 4 * 8 + columns) =
                Op::pack2(o[e] * factor, o[e + 1] * factor);
        if (columns == 0 && a.p.lse != nullptr)
          a.p.lse[int64_t{head} * a.p.tokens + token] = lse * kLn2;
      } else {
        const int64_t place = piece * kRows + r;
        float* out = a.plan.partial_out + place * kHeadDim + columns;
#pragma unroll
        for (int e = half * 2; e < kHeadDim / 2; e += 4)
          *reinterpret_cast<float2*>(out + e / 4 * 8) =
              make_float2(o[e] * factor, o[e + 1] * factor);
        if (columns == 0) a.plan.partial_lse[place] = lse;
      }
    }
  }
};

template <class Op, class C>
__device__ __forceinline__ void compute(Storage<C>& shared, const Args& a, int begin, int end) {
  uint32_t turn = 0, tiles = 0;
  for (int at = begin; at < end; ++tiles) {
    const uint32_t stage = tiles % C::kQStages;
    ptx::mbarrier_wait(ptx::shared_address(&shared.q_full[stage]), tiles / C::kQStages & 1);
    Piece<Op, C> piece(shared, a, stage);
    piece.run(turn);
    piece.release(shared.q_empty[stage]);  // of the tile's place as well, which was copied
    const Tile& tile = piece.tile;
    piece.write(tile.block == 0 && tile.last == tile.slot.blocks,
                piece_of(blockIdx.x, tile.begin >= begin));
    at += tile.last - tile.block;
  }
}

}  // namespace flashsci::sm90::paged
