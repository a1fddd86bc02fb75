// dq for Turing, and the gradient of a bias that has an element for every pair.
//
// Maths     As in dkdv_kernel.cuh: dQ = scale dS K, dBias = dS.
// Roles     One CTA per (query tile, query head, batch), all on grid.x. kWarps warps own kBlockQ /
//           kWarps query rows each, whose Q, dO and dQ stay in registers; they share the tiles of K
//           and V. No two CTAs add to the same memory: with dkdv_kernel.cuh this takes 7 products
//           where 5 would do, and gives equal bits in every run.
// Shared    Two stages of K and V: `QueryStorage`. Q and dO before the loop, and dQ after it, pass
//           through the same bytes.
// Pipeline  As in the forward: K_n+1 is fetched during S = Q K_n^T and stored after it, V_n+1
//           likewise during the rest; one barrier a tile.
// Limits    Shared-memory reads (16 rows a warp) or tensor cores (32 rows). docs/develop/kernels/sm75.md.
#pragma once
#include "../query_tile.cuh"
#include "dkdv_kernel.cuh"

namespace flashsci::sm75::bwd {

template <int kHeadDim_, int kBlockQ_, int kBlockK_, int kWarps_, int kMinBlocks_>
struct QueryTiling {
  static constexpr int kHeadDim = kHeadDim_, kBlockQ = kBlockQ_, kBlockK = kBlockK_;
  static constexpr int kWarps = kWarps_, kMinBlocks = kMinBlocks_, kThreads = 32 * kWarps;
  static constexpr int kRows = kBlockQ / kWarps, kM = kRows / 16;  // per warp
  static constexpr int kN = kBlockK / 8, kDimBlocks = kHeadDim / 8;
  static_assert(kRows % 16 == 0 && kBlockK % 16 == 0, "whole mma tiles");
  static_assert(kBlockQ <= 4 * kBlockK, "Q, dO and dQ pass through the stages");
};

template <class C>
struct alignas(128) QueryStorage {
  uint16_t tiles[2][2][C::kBlockK * C::kHeadDim];  // [stage, K or V, kBlockK, kHeadDim]
};

// dS of one warp to a dbias that has an element for every pair. row, key: this lane's first.
template <class Op, int kM, int kN>
__device__ __forceinline__ void store_bias_gradient(const float (&ds)[kM][kN][4],
                                                    const FlashsciBackwardParams& p, int64_t offset,
                                                    int row, int key) {
  const FlashsciScoreStrides& strides = p.dbias_strides;
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) {
    const int m = i / (4 * kN), n = i / 4 % kN, e = i % 4;
    const int at_row = row + m * 16 + e / 2 * 8, at_key = key + n * 8 + e % 2;
    if (at_row >= p.seq_q || at_key >= p.seq_k) continue;
    const int64_t at = offset + at_row * strides.row + at_key * strides.column;
    if (p.bias_mask.bias_is_fp32)
      static_cast<float*>(p.dbias)[at] = ds[m][n][e];
    else
      static_cast<uint16_t*>(p.dbias)[at] =
          static_cast<uint16_t>(Op::pack2(ds[m][n][e], ds[m][n][e]));
  }
}

// The work of a warp: its place, and the steps of the loop over key tiles, as in the forward.
template <class Op, class C, bool kAny>
struct QueryWarp {
  using T = Tile<C::kHeadDim>;
  using Moving = TileRegisters<C::kBlockK, C::kHeadDim, C::kThreads>;  // a K or V tile
  using Operand = uint32_t[C::kM][C::kHeadDim / 16][4];  // Q or dO: [m16, k16 of D, fragment]
  using Sums = float[C::kM][C::kDimBlocks][4];           // dQ: [m16, n8 of D, fragment]
  using Scores = float[C::kM][C::kN][4];                 // [m16, n8 of keys, fragment]
  using Statistics = float2[C::kM][2];                   // [m16, row g or g + 8]: -lse, -delta
  static constexpr int kTileBytes = C::kBlockK * T::kRowBytes;

  const FlashsciBackwardParams& p;
  const BackwardPlan& plan;
  const uint32_t tiles;
  const TileCoord& place;
  const QueryTile<C>& work;
  const int tile_row;        // the CTA's first row in the sequence
  const int warp_row, lane;  // the warp's first row
  const uint32_t head_k;
  const Window window;
  const VisibleKeys<C> keys;
  const uint32_t storage, warp_tile;  // address of the stages; Q, dO and dQ of this warp

  __device__ __forceinline__ QueryWarp(const FlashsciBackwardParams& p_, const BackwardPlan& plan_,
                                       uint32_t tiles_, const TileCoord& place_,
                                       const QueryTile<C>& work_, QueryStorage<C>& shared)
      : p(p_),
        plan(plan_),
        tiles(tiles_),
        place(place_),
        work(work_),
        tile_row(work.tile * C::kBlockQ),
        warp_row(tile_row + static_cast<int>(threadIdx.x / 32) * C::kRows),
        lane(threadIdx.x % 32),
        head_k(place.head / static_cast<uint32_t>(p.heads_q / p.heads_k)),
        window(p.window_left, p.window_right, p.lower_right != 0, work.seq_q, work.seq_k),
        keys(window, tile_row, warp_row, work.seq_q),
        storage(ptx::shared_address(&shared)),
        warp_tile(storage + static_cast<int>(threadIdx.x / 32) * C::kRows * T::kRowBytes) {}

  __device__ __forceinline__ void fetch_k(Moving& moving, int tile) const {
    const int row = tile * C::kBlockK;
    fetch_rows<kAny>(moving, p.k, place.offset(p.k_strides, head_k), p.k_strides,
                     work.first_k + row, work.seq_k - row, p.head_dim, p.copy_bytes, plan.vector);
  }
  __device__ __forceinline__ void fetch_v(Moving& moving, int tile) const {
    const int row = tile * C::kBlockK;
    fetch_rows<kAny>(moving, p.v, place.offset(p.v_strides, head_k), p.v_strides,
                     work.first_k + row, work.seq_k - row, p.head_dim_v, p.copy_bytes, plan.vector);
  }
  // Q and dO into registers through the stages; K and V of the first tile into the first stage.
  __device__ __forceinline__ void load_rows_and_first_tile(Operand& q, Operand& dout,
                                                           Moving& moving) const {
    const int row = work.first_q + tile_row, rows_valid = work.seq_q - tile_row;
    TileRegisters<C::kBlockQ, C::kHeadDim, C::kThreads> rows;
    fetch_rows<kAny>(rows, p.q, place.offset(p.q_strides, place.head), p.q_strides, row, rows_valid,
                     p.head_dim, p.copy_bytes, plan.vector);
    rows.store(storage);
    const int64_t dout_start = place.offset(p.dout_strides, place.head);
    fetch_rows<kAny>(rows, p.dout, dout_start, p.dout_strides, row,
                     p.dout != nullptr ? rows_valid : 0, p.head_dim_v, p.copy_bytes, plan.vector);
    __syncthreads();
    load_rows<C::kHeadDim>(q, warp_tile + row_fragment<C::kHeadDim>(lane));
    __syncthreads();
    rows.store(storage);
    fetch_k(moving, keys.first_tile);
    __syncthreads();
    load_rows<C::kHeadDim>(dout, warp_tile + row_fragment<C::kHeadDim>(lane));
    __syncthreads();
    moving.store(storage);
    fetch_v(moving, keys.first_tile);
    moving.store(storage + kTileBytes);
  }
  __device__ __forceinline__ void load_statistics(Statistics& statistics) const {
    const float2* source = plan.statistics +
                           (static_cast<int64_t>(place.batch) * p.heads_q + place.head) * p.seq_q +
                           work.first_q;
#pragma unroll
    for (int i = 0; i < C::kM * 2; ++i) {
      const int at = warp_row + i * 8 + lane / 4;
      statistics[i / 2][i % 2] = at < work.seq_q ? __ldg(source + at) : make_float2(-INFINITY, 0.f);
    }
  }

  // S becomes P, dP - delta becomes dS.
  __device__ __forceinline__ void find_ds(Scores& s, Scores& dp, const Statistics& statistics,
                                          int tile) const {
    if (plan.scores.mode != kScaled) modify_scores(s, dp, plan.scores);
    const int row = warp_row + lane / 4, column = tile * C::kBlockK + lane % 4 * 2;
    if constexpr (kAny)
      apply_bias_mask<Op>(s, BiasMaskView(p.bias_mask, place.batch0, place.batch1, place.head), row,
                          column, work.seq_q, work.seq_k, plan.bias_factor);
    if (keys.cut(tile)) mask_scores(s, window, row, column);
    exponentiate(s, statistics, plan);
    multiply_by_p(dp, s);
    if constexpr (kAny) {
      if (plan.writes_bias)
        store_bias_gradient<Op>(dp, p, place.offset(p.dbias_strides, place.head), row, column);
    }
  }

  __device__ __forceinline__ void write(Sums& dq) const {
    const TileCoord home(opaque(blockIdx.x), tiles, p.heads_q, p);  // recomputed, not kept
    store_rows<Op, C::kHeadDim>(
        dq, p.scale, warp_tile,
        static_cast<uint16_t*>(p.dq) + home.offset(p.dq_strides, home.head) +
            static_cast<int64_t>(work.first_q + warp_row) * p.dq_strides.row,
        p.dq_strides.row, work.seq_q - warp_row, p.head_dim, plan.vector_dq != 0);
  }

  __device__ __forceinline__ void run() const {
    Operand q, dout;
    Sums dq;
    Statistics statistics;
    Moving moving;
    set_zero(dq);
    if (keys.first_tile < keys.end_tile) {
      load_rows_and_first_tile(q, dout, moving);
      load_statistics(statistics);
    }
    uint32_t stage = 0;  // bytes to the stage of tile n
#pragma unroll 1
    for (int tile = keys.first_tile; tile < keys.end_tile; ++tile, stage ^= 2 * kTileBytes) {
      __syncthreads();  // K_n and V_n are stored; no warp still reads the other stage
      const bool active = keys.seen(tile);
      const bool more = tile + 1 < keys.end_tile;
      const uint32_t other = storage + (stage ^ (2 * kTileBytes));
      const uint32_t k_tile = storage + stage, v_tile = k_tile + kTileBytes;
      Scores s, dp;
      if (more) fetch_k(moving, tile + 1);
      if (active) {
        set_zero(s);
        multiply_transposed<Op, C::kHeadDim>(s, q, k_tile + column_fragment<C::kHeadDim>(lane));
      }
      if (more) {
        moving.store(other);
        fetch_v(moving, tile + 1);
      }
      if (active) {
        start_from_delta(dp, statistics);
        multiply_transposed<Op, C::kHeadDim>(dp, dout, v_tile + column_fragment<C::kHeadDim>(lane));
        find_ds(s, dp, statistics, tile);
        multiply_accumulators<Op, C::kHeadDim>(dq, dp, k_tile + row_fragment<C::kHeadDim>(lane));
      }
      if (more) moving.store(other + kTileBytes);
    }
    __syncthreads();  // the stages are free for dQ
    if (p.dq != nullptr) write(dq);
  }
};

template <class Op, class C, bool kAny>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    backward_queries_kernel(const __grid_constant__ FlashsciBackwardParams p,
                            const __grid_constant__ BackwardPlan plan, uint32_t tiles) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<QueryStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));

  const TileCoord place(blockIdx.x, tiles, p.heads_q, p);
  const QueryTile<C> work(place.tile, tiles, p);
  if (work.tile < 0 || work.tile * C::kBlockQ >= work.seq_q) return;
  QueryWarp<Op, C, kAny>(p, plan, tiles, place, work, shared).run();
}

}  // namespace flashsci::sm75::bwd
