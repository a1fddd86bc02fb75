// Forward attention for Turing (T4): fp16, mma.m16n8k8, no cp.async, 64 KiB of shared memory an SM.
//
// Maths     o_i = sum_j p_ij v_j / l_i, p_ij = exp(s_ij - m_i), l_i = sum_j p_ij,
//           lse_i = m_i + log l_i, s = scale q k^T or softcap tanh(scale q k^T / softcap), + bias,
//           over the keys that window and mask show.
// Roles     One CTA per (query tile, head, batch), all on grid.x, the tiles of a head side by side
//           and the longest first. kWarps warps own kBlockQ / kWarps query rows each, whose Q stays
//           in registers; they share the K and V tiles. Packed calls find their sequence on the
//           device.
// Shared    Two stages of K and V, swizzled 16-byte chunks: `SharedStorage`. Q before the loop and
//           the output after it pass through the same bytes.
// Pipeline  Global memory -> registers -> shared memory: K_n-1 is fetched during S = Q K_n^T and
//           stored behind it, V_n-1 likewise during softmax and P V_n, into the stage that nobody
//           reads; one barrier a tile. Tiles go from the diagonal to the left.
// Limits    Shared memory, which gives an SM of Turing 64 bytes a clock: 16 rows a warp read as
//           long as they multiply, 32 half of it, so D <= 96 has 32. docs/kernels/sm75.md.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../core/bias_mask.cuh"
#include "../../core/head_coord.cuh"
#include "../../core/launch.cuh"
#include "../../core/mask.cuh"
#include "../../core/poison.cuh"
#include "../../core/register_tile.cuh"
#include "../../core/score_mod.cuh"
#include "../../core/softmax.cuh"
#include "../../core/store_rows.cuh"
#include "../../core/varlen.cuh"
#include "../../core/warp_mma.cuh"
#include "../../include/flashsci.h"

namespace flashsci::sm75::fwd {

static_assert(std::is_trivially_copyable_v<FlashsciForwardParams>, "passed to the kernel by value");

inline constexpr int kSharedPerSM = 64 * 1024;

template <int kHeadDim_, int kBlockQ_, int kBlockK_, int kWarps_, int kMinBlocks_>
struct Tiling {
  static constexpr int kHeadDim = kHeadDim_, kBlockQ = kBlockQ_, kBlockK = kBlockK_;
  static constexpr int kWarps = kWarps_, kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kBlockQ / kWarps;   // query rows of a warp
  static constexpr int kM = kRows / 16;            // m16 blocks of a warp
  static constexpr int kN = kBlockK / 8;           // n8 blocks of S
  static constexpr int kDimBlocks = kHeadDim / 8;  // n8 blocks of O
  static_assert(kRows % 16 == 0 && kBlockK % 16 == 0 && kHeadDim % 32 == 0, "whole mma tiles");
};

template <class C>
struct alignas(128) SharedStorage {
  uint16_t kv[2][2][C::kBlockK * C::kHeadDim];  // [stage, K or V, kBlockK, kHeadDim]
};

// What the host derives from the parameters, once.
struct ForwardPlan {
  uint32_t tiles;  // grid slots of one head
  ScorePlan scores;
  int vector_out;  // output rows take 16-byte stores
};

template <class Op, class C, bool kVector, bool kHasBiasMask>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    forward_kernel(const __grid_constant__ FlashsciForwardParams p,
                   const __grid_constant__ ForwardPlan plan) {
  using T = Tile<C::kHeadDim>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));

  // Which query tile of which head.
  const HeadCoord place(blockIdx.x, plan.tiles, p.heads_q, p.batch1);
  const uint32_t slot = blockIdx.x - place.batch_head * plan.tiles;
  TileOfSequence work;
  if (p.cu_seqlens_q != nullptr) {
    work =
        find_tile<C::kBlockQ>(slot, p.cu_seqlens_q, p.cu_seqlens_k, p.num_seqs, p.seq_q, p.seq_k);
  } else {
    work = {static_cast<int>(p.window_right >= 0 ? plan.tiles - 1 - slot : slot), 0, p.seq_q, 0,
            p.seq_k};
  }
  const int tile_row = work.tile * C::kBlockQ;
  if (work.tile < 0 || tile_row >= work.seq_q) return;

  const uint32_t head_k = place.head / static_cast<uint32_t>(p.heads_q / p.heads_k);
  const auto* k = static_cast<const uint16_t*>(p.k) + place.offset(p.k_strides, head_k) +
                  work.first_k * p.k_strides.row;
  const auto* v = static_cast<const uint16_t*>(p.v) + place.offset(p.v_strides, head_k) +
                  work.first_k * p.v_strides.row;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = tile_row + warp * C::kRows;
  const Window window(p.window_left, p.window_right, p.lower_right != 0, work.seq_q, work.seq_k);

  // Key tiles that any row of this CTA sees, and what this warp sees of them: some of its rows see
  // [seen_begin, seen_end), all of them [full_begin, full_end).
  const int last_row = min(tile_row + C::kBlockQ, work.seq_q) - 1;
  const int keys_begin = window.begin(tile_row), keys_end = window.end(last_row);
  const int first_tile = keys_begin / C::kBlockK;
  const int end_tile =
      keys_begin < keys_end ? (keys_end + C::kBlockK - 1) / C::kBlockK : first_tile;
  const int warp_last_row = min(warp_row + C::kRows, work.seq_q) - 1;
  const int seen_begin = window.begin(warp_row);
  const int seen_end = warp_row < work.seq_q ? window.end(warp_last_row) : 0;
  const int full_begin = window.begin(warp_last_row), full_end = window.end(warp_row);

  constexpr int kTileBytes = C::kBlockK * T::kRowBytes;
  const uint32_t storage = ptx::shared_address(&shared);
  const uint32_t warp_tile = storage + warp * C::kRows * T::kRowBytes;  // Q, output

  TileRegisters<C::kBlockK, C::kHeadDim, C::kThreads> moving;  // a K or V tile
  const auto fetch_k = [&](int tile) {
    const int first = tile * C::kBlockK;
    moving.template fetch<kVector>(k + first * p.k_strides.row, p.k_strides.row, work.seq_k - first,
                                   p.head_dim, p.copy_bytes);
  };
  const auto fetch_v = [&](int tile) {
    const int first = tile * C::kBlockK;
    moving.template fetch<kVector>(v + first * p.v_strides.row, p.v_strides.row, work.seq_k - first,
                                   p.head_dim_v, p.copy_bytes);
  };

  uint32_t q[C::kM][C::kHeadDim / 16][4];  // [m16, k16 of D, fragment]
  float o[C::kM][C::kDimBlocks][4];        // [m16, n8 of Dv, fragment]
  float row_max[C::kM][2];  // [m16, row g or g + 8], in units of 1 / exp_scale; stale by <= 2^8
  float row_sum[C::kM][2];  // this lane's part of the sum
  set_zero(o);
#pragma unroll
  for (int m = 0; m < C::kM; ++m) {
    row_max[m][0] = row_max[m][1] = -INFINITY;
    row_sum[m][0] = row_sum[m][1] = 0.f;
  }

  uint32_t stage = 0;  // bytes to the stage of tile n
  if (first_tile < end_tile) {
    {
      TileRegisters<C::kBlockQ, C::kHeadDim, C::kThreads> rows;
      rows.template fetch<kVector>(
          static_cast<const uint16_t*>(p.q) + place.offset(p.q_strides, place.head) +
              (work.first_q + tile_row) * p.q_strides.row,
          p.q_strides.row, work.seq_q - tile_row, p.head_dim, p.copy_bytes);
      rows.store(storage);
    }
    fetch_k(end_tile - 1);
    __syncthreads();
    load_rows<C::kHeadDim>(q, warp_tile + row_fragment<C::kHeadDim>(lane));
    __syncthreads();
    moving.store(storage);
    fetch_v(end_tile - 1);
    moving.store(storage + kTileBytes);
  }
  const uint32_t k_start = storage + column_fragment<C::kHeadDim>(lane);
  const uint32_t v_start = storage + kTileBytes + row_fragment<C::kHeadDim>(lane);
#pragma unroll 1
  for (int tile = end_tile - 1; tile >= first_tile; --tile) {
    __syncthreads();  // K_n and V_n are there; nobody reads the other stage any more
    const int first_key = tile * C::kBlockK;
    const bool active = first_key < seen_end && first_key + C::kBlockK > seen_begin;
    const bool more = tile > first_tile;
    const uint32_t other = storage + (stage ^ (2 * kTileBytes));
    float s[C::kM][C::kN][4];  // [m16, n8 of keys, fragment]: scores, then P
    if (more) fetch_k(tile - 1);
    if (active) {
      set_zero(s);
      multiply_transposed<Op, C::kHeadDim>(s, q, k_start + stage);
    }
    if (more) {
      moving.store(other);
      fetch_v(tile - 1);
    }
    if (active) {
      scale_scores(s, plan.scores);
      const int row = warp_row + lane / 4, column = first_key + lane % 4 * 2;
      if constexpr (kHasBiasMask)
        apply_bias_mask<Op>(s, BiasMaskView(p.bias_mask, place.batch0, place.batch1, place.head),
                            row, column, p.seq_q, p.seq_k, 1.f);
      if (first_key < full_begin || first_key + C::kBlockK > full_end)
        mask_scores(s, window, row, column);
      online_softmax(s, o, row_max, row_sum, plan.scores.exp_scale);
      multiply_accumulators<Op, C::kHeadDim>(o, s, v_start + stage);
    }
    if (more) moving.store(other + kTileBytes);
    stage ^= 2 * kTileBytes;
  }

  __syncthreads();  // the stages are free for the output
  if (warp_row >= work.seq_q) return;
  const int row = work.first_q + warp_row, rows = work.seq_q - warp_row;
  const HeadCoord home(opaque(blockIdx.x), plan.tiles, p.heads_q,
                       p.batch1);  // found again, not kept
  float* lse = p.lse + static_cast<int64_t>(home.batch_head) * p.seq_q + row;
#pragma unroll
  for (int m = 0; m < C::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(row_sum[m][half]);
      const float inverse = sum == 0.f ? 0.f : 1.f / sum;
      const int i = m * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0 && i < rows)
        lse[i] = sum == 0.f ? -INFINITY : fmaf(row_max[m][half], plan.scores.lse_scale, logf(sum));
#pragma unroll
      for (int d = 0; d < C::kDimBlocks; ++d) {
        o[m][d][half * 2] *= inverse;
        o[m][d][half * 2 + 1] *= inverse;
      }
    }
  }
  auto* out = static_cast<uint16_t*>(p.out) + home.offset(p.out_strides, home.head) +
              row * p.out_strides.row;
  store_rows<Op, C::kHeadDim>(o, 1.f, warp_tile, out, p.out_strides.row, rows, p.head_dim_v,
                              plan.vector_out != 0);
}

}  // namespace flashsci::sm75::fwd
