// dq for Turing, and the gradient of a bias that has a place for every pair.
//
// Maths     As in dkdv_kernel.cuh: dQ = scale dS K, dBias = dS.
// Roles     One CTA per (query tile, query head, batch), all on grid.x. kWarps warps own kBlockQ /
//           kWarps query rows each, whose Q, dO and dQ stay in registers; they share the tiles of K
//           and V. Nothing is added to memory that another CTA adds to: with dkdv_kernel.cuh 7
//           products where 5 would do, and equal bits in every run.
// Shared    Two stages of K and V: `QueryStorage`. Q and dO before the loop, dQ after it pass
//           through the same bytes.
// Pipeline  As in the forward: K_n+1 is fetched during S = Q K_n^T and stored behind it, V_n+1
//           likewise during the rest; one barrier a tile.
// Limits    Shared-memory reads (16 rows a warp) or tensor cores (32 rows). docs/kernels/sm75.md.
#pragma once
#include "dkdv_kernel.cuh"

namespace flashsci::sm75::bwd {

template <int kHeadDim_, int kBlockQ_, int kBlockK_, int kWarps_, int kMinBlocks_>
struct QueryTiling {
  static constexpr int kHeadDim = kHeadDim_, kBlockQ = kBlockQ_, kBlockK = kBlockK_;
  static constexpr int kWarps = kWarps_, kMinBlocks = kMinBlocks_, kThreads = 32 * kWarps;
  static constexpr int kRows = kBlockQ / kWarps, kM = kRows / 16;  // of a warp
  static constexpr int kN = kBlockK / 8, kDimBlocks = kHeadDim / 8;
  static_assert(kRows % 16 == 0 && kBlockK % 16 == 0, "whole mma tiles");
  static_assert(kBlockQ <= 4 * kBlockK, "Q, dO and dQ pass through the stages");
};

template <class C>
struct alignas(128) QueryStorage {
  uint16_t tiles[2][2][C::kBlockK * C::kHeadDim];  // [stage, K or V, kBlockK, kHeadDim]
};

// dS of one warp to a dbias that has a place for every pair. row, key: this lane's first.
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

template <class Op, class C, bool kAny>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    backward_queries_kernel(const __grid_constant__ FlashsciBackwardParams p,
                            const __grid_constant__ BackwardPlan plan, uint32_t tiles) {
  using T = Tile<C::kHeadDim>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<QueryStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));

  const TileCoord place(blockIdx.x, tiles, p.heads_q, p);
  TileOfSequence work;
  if (p.cu_seqlens_q != nullptr) {
    work = find_tile<C::kBlockQ>(place.tile, p.cu_seqlens_q, p.cu_seqlens_k, p.num_seqs, p.seq_q,
                                 p.seq_k);
  } else {  // the longest first
    work = {static_cast<int>(p.window_right >= 0 ? tiles - 1 - place.tile : place.tile), 0, p.seq_q,
            0, p.seq_k};
  }
  const int tile_row = work.tile * C::kBlockQ;
  if (work.tile < 0 || tile_row >= work.seq_q) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = tile_row + warp * C::kRows;
  const uint32_t head_k = place.head / static_cast<uint32_t>(p.heads_q / p.heads_k);
  const Window window(p.window_left, p.window_right, p.lower_right != 0, work.seq_q, work.seq_k);
  const int last_row = min(tile_row + C::kBlockQ, work.seq_q) - 1;
  const int keys_begin = window.begin(tile_row), keys_end = window.end(last_row);
  const int first_tile = keys_begin / C::kBlockK;
  const int end_tile =
      keys_begin < keys_end ? (keys_end + C::kBlockK - 1) / C::kBlockK : first_tile;
  // Some rows of this warp see keys of [seen_begin, seen_end), all see [full_begin, full_end).
  const int warp_last_row = min(warp_row + C::kRows, work.seq_q) - 1;
  const int seen_begin = window.begin(warp_row);
  const int seen_end = warp_row < work.seq_q ? window.end(warp_last_row) : 0;
  const int full_begin = window.begin(warp_last_row), full_end = window.end(warp_row);

  constexpr int kTileBytes = C::kBlockK * T::kRowBytes;
  const uint32_t storage = ptx::shared_address(&shared);
  const uint32_t warp_tile = storage + warp * C::kRows * T::kRowBytes;  // Q, dO, dQ

  uint32_t q[C::kM][C::kHeadDim / 16][4];     // [m16, k16 of D, fragment]
  uint32_t dout[C::kM][C::kHeadDim / 16][4];  // [m16, k16 of Dv, fragment]
  float dq[C::kM][C::kDimBlocks][4];          // [m16, n8 of D, fragment]
  float2 statistics[C::kM][2];                // [m16, row g or g + 8]: -lse, -delta
  set_zero(dq);

  TileRegisters<C::kBlockK, C::kHeadDim, C::kThreads> moving;  // a K or V tile
  const auto fetch_k = [&](int tile) {
    const int row = tile * C::kBlockK;
    fetch_rows<kAny>(moving, p.k, place.offset(p.k_strides, head_k), p.k_strides,
                     work.first_k + row, work.seq_k - row, p.head_dim, p.copy_bytes, plan.vector);
  };
  const auto fetch_v = [&](int tile) {
    const int row = tile * C::kBlockK;
    fetch_rows<kAny>(moving, p.v, place.offset(p.v_strides, head_k), p.v_strides,
                     work.first_k + row, work.seq_k - row, p.head_dim_v, p.copy_bytes, plan.vector);
  };

  if (first_tile < end_tile) {
    const int row = work.first_q + tile_row, rows_valid = work.seq_q - tile_row;
    TileRegisters<C::kBlockQ, C::kHeadDim, C::kThreads> rows;
    fetch_rows<kAny>(rows, p.q, place.offset(p.q_strides, place.head), p.q_strides, row, rows_valid,
                     p.head_dim, p.copy_bytes, plan.vector);
    rows.store(storage);
    fetch_rows<kAny>(rows, p.dout, place.offset(p.dout_strides, place.head), p.dout_strides, row,
                     p.dout != nullptr ? rows_valid : 0, p.head_dim_v, p.copy_bytes, plan.vector);
    __syncthreads();
    load_rows<C::kHeadDim>(q, warp_tile + row_fragment<C::kHeadDim>(lane));
    __syncthreads();
    rows.store(storage);
    fetch_k(first_tile);
    __syncthreads();
    load_rows<C::kHeadDim>(dout, warp_tile + row_fragment<C::kHeadDim>(lane));
    __syncthreads();
    moving.store(storage);
    fetch_v(first_tile);
    moving.store(storage + kTileBytes);
    const float2* source = plan.statistics +
                           (static_cast<int64_t>(place.batch) * p.heads_q + place.head) * p.seq_q +
                           work.first_q;
#pragma unroll
    for (int i = 0; i < C::kM * 2; ++i) {
      const int at = warp_row + i * 8 + lane / 4;
      statistics[i / 2][i % 2] = at < work.seq_q ? __ldg(source + at) : make_float2(-INFINITY, 0.f);
    }
  }

  uint32_t stage = 0;  // bytes to the stage of tile n
#pragma unroll 1
  for (int tile = first_tile; tile < end_tile; ++tile, stage ^= 2 * kTileBytes) {
    __syncthreads();  // K_n and V_n are there; nobody reads the other stage any more
    const int first_key = tile * C::kBlockK;
    const bool active = first_key < seen_end && first_key + C::kBlockK > seen_begin;
    const bool more = tile + 1 < end_tile;
    const uint32_t other = storage + (stage ^ (2 * kTileBytes));
    const uint32_t k_tile = storage + stage, v_tile = k_tile + kTileBytes;

    float s[C::kM][C::kN][4];   // S, then P: [m16 of queries, n8 of keys, fragment]
    float dp[C::kM][C::kN][4];  // dP - delta, then dS
    if (more) fetch_k(tile + 1);
    if (active) {
      set_zero(s);
      multiply_transposed<Op, C::kHeadDim>(s, q, k_tile + column_fragment<C::kHeadDim>(lane));
    }
    if (more) {
      moving.store(other);
      fetch_v(tile + 1);
    }
    if (active) {
#pragma unroll
      for (int i = 0; i < C::kM * C::kN * 4; ++i)
        dp[i / (4 * C::kN)][i / 4 % C::kN][i % 4] = statistics[i / (4 * C::kN)][i % 4 / 2].y;
      multiply_transposed<Op, C::kHeadDim>(dp, dout, v_tile + column_fragment<C::kHeadDim>(lane));
      if (plan.score_mode != kScaled) shape_scores(s, dp, plan);
      const int row = warp_row + lane / 4, column = first_key + lane % 4 * 2;
      if constexpr (kAny)
        apply_bias_mask<Op>(s, BiasMaskView(p.bias_mask, place.batch0, place.batch1, place.head),
                            row, column, work.seq_q, work.seq_k, plan.bias_factor);
      if (first_key < full_begin || first_key + C::kBlockK > full_end)
        mask_scores(s, window, row, column);
#pragma unroll
      for (int i = 0; i < C::kM * C::kN * 4; ++i) {
        const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
        s[m][n][e] = ptx::ex2_approx(fmaf(s[m][n][e], plan.exp_scale, statistics[m][e / 2].x));
      }
      if (any_large(statistics)) limit_probabilities(s);
#pragma unroll
      for (int i = 0; i < C::kM * C::kN * 4; ++i)
        dp[i / (4 * C::kN)][i / 4 % C::kN][i % 4] *= s[i / (4 * C::kN)][i / 4 % C::kN][i % 4];
      if constexpr (kAny) {
        if (plan.writes_bias)
          store_bias_gradient<Op>(dp, p, place.offset(p.dbias_strides, place.head), row, column);
      }
      multiply_accumulators<Op, C::kHeadDim>(dq, dp, k_tile + row_fragment<C::kHeadDim>(lane));
    }
    if (more) moving.store(other + kTileBytes);
  }

  __syncthreads();  // the stages are free for dQ
  if (p.dq == nullptr) return;
  const TileCoord home(opaque(blockIdx.x), tiles, p.heads_q, p);  // found again, not kept
  store_rows<Op, C::kHeadDim>(dq, p.scale, warp_tile,
                              static_cast<uint16_t*>(p.dq) + home.offset(p.dq_strides, home.head) +
                                  static_cast<int64_t>(work.first_q + warp_row) * p.dq_strides.row,
                              p.dq_strides.row, work.seq_q - warp_row, p.head_dim,
                              plan.vector_dq != 0);
}

}  // namespace flashsci::sm75::bwd
