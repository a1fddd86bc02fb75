// Forward attention for Turing (T4): fp16, mma.m16n8k8, no cp.async, 64 KiB of shared memory an SM.
//
// Maths     o_i = sum_j p_ij v_j / l_i, p_ij = exp(s_ij - m_i), l_i = sum_j p_ij,
//           lse_i = m_i + log l_i, s = scale q k^T or softcap tanh(scale q k^T / softcap), + bias,
//           over the keys that window and mask show.
// Roles     One CTA per (query tile, head, batch), all on grid.x, the tiles of a head in sequence
//           and the longest first. kWarps warps own kBlockQ / kWarps query rows each, whose Q stays
//           in registers; they share the K and V tiles. Packed calls find their sequence on the
//           device.
// Shared    Two stages of K and V, swizzled 16-byte chunks: `SharedStorage`. Q before the loop and
//           the output after it pass through the same bytes.
// Pipeline  Global memory -> registers -> shared memory: K_n-1 is fetched during S = Q K_n^T and
//           stored after it, V_n-1 likewise during softmax and P V_n, into the stage that no warp
//           reads; one barrier a tile. Tiles go from the diagonal to the left.
// Limits    Shared memory, which gives an SM of Turing 64 bytes a clock: 16 rows a warp take as
//           long to read as to multiply, 32 half as long, so D <= 96 has 32.
//           docs/develop/kernels/sm75.md.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../core/bias_mask.cuh"
#include "../../core/coord.cuh"
#include "../../core/launch.cuh"
#include "../../core/poison.cuh"
#include "../../core/register_tile.cuh"
#include "../../core/score_mod.cuh"
#include "../../core/softmax.cuh"
#include "../../core/store_rows.cuh"
#include "../../core/varlen.cuh"
#include "../../core/warp_mma.cuh"
#include "../../include/flashsci.h"
#include "../query_tile.cuh"

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

// The values that the host derives once from the parameters.
struct ForwardPlan {
  uint32_t tiles;  // grid slots of one head
  ScorePlan scores;
  float lse_scale;  // from the units of the running maximum to natural log
  int vector_out;   // output rows take 16-byte stores
};

// The work of a warp: its place, and the steps of the loop over key tiles. Fragments are locals of
// `run`: a struct with arrays stays in memory until its loops are unrolled, and its other members
// are then simplified too late.
template <class Op, class C, bool kVector, bool kHasBiasMask>
struct Warp {
  using T = Tile<C::kHeadDim>;
  using Moving = TileRegisters<C::kBlockK, C::kHeadDim, C::kThreads>;  // a K or V tile
  using Q = uint32_t[C::kM][C::kHeadDim / 16][4];                      // [m16, k16 of D, fragment]
  using Output = float[C::kM][C::kDimBlocks][4];                       // [m16, n8 of Dv, fragment]
  using Scores = float[C::kM][C::kN][4];  // [m16, n8 of keys, fragment], then P
  using OfRows = float[C::kM][2];         // [m16, row g or g + 8]
  static constexpr int kTileBytes = C::kBlockK * T::kRowBytes;

  const FlashsciForwardParams& p;
  const ForwardPlan& plan;
  const HeadCoord& place;
  const QueryTile<C>& work;
  const int tile_row;  // the CTA's first row in the sequence
  const uint32_t head_k;
  const uint16_t *k, *v;     // of the sequence
  const int lane, warp_row;  // the warp's first row
  const Window window;
  const VisibleKeys<C> keys;
  const uint32_t storage, warp_tile;  // the stages; Q and output of this warp

  __device__ __forceinline__ Warp(const FlashsciForwardParams& p_, const ForwardPlan& plan_,
                                  const HeadCoord& place_, const QueryTile<C>& work_,
                                  SharedStorage<C>& shared)
      : p(p_),
        plan(plan_),
        place(place_),
        work(work_),
        tile_row(work.tile * C::kBlockQ),
        head_k(place.head / static_cast<uint32_t>(p.heads_q / p.heads_k)),
        k(rows_of_sequence(p.k, p.k_strides)),
        v(rows_of_sequence(p.v, p.v_strides)),
        lane(threadIdx.x % 32),
        warp_row(tile_row + static_cast<int>(threadIdx.x / 32) * C::kRows),
        window(p.window_left, p.window_right, p.lower_right != 0, work.seq_q, work.seq_k),
        keys(window, tile_row, warp_row, work.seq_q),
        storage(ptx::shared_address(&shared)),
        warp_tile(storage + static_cast<int>(threadIdx.x / 32) * C::kRows * T::kRowBytes) {}
  __device__ __forceinline__ const uint16_t* rows_of_sequence(
      const void* data, const FlashsciStrides& strides) const {
    return static_cast<const uint16_t*>(data) + place.offset(strides, head_k) +
           work.first_k * strides.row;
  }

  __device__ __forceinline__ void fetch_k(Moving& moving, int tile) const {
    const int first = tile * C::kBlockK;
    moving.template fetch<kVector>(k + first * p.k_strides.row, p.k_strides.row, work.seq_k - first,
                                   p.head_dim, p.copy_bytes);
  }
  __device__ __forceinline__ void fetch_v(Moving& moving, int tile) const {
    const int first = tile * C::kBlockK;
    moving.template fetch<kVector>(v + first * p.v_strides.row, p.v_strides.row, work.seq_k - first,
                                   p.head_dim_v, p.copy_bytes);
  }
  // Q into registers through the stages; K and V of the first tile into the first stage.
  __device__ __forceinline__ void load_q_and_first_tile(Q& q, Moving& moving) const {
    {
      TileRegisters<C::kBlockQ, C::kHeadDim, C::kThreads> rows;
      rows.template fetch<kVector>(
          static_cast<const uint16_t*>(p.q) + place.offset(p.q_strides, place.head) +
              (work.first_q + tile_row) * p.q_strides.row,
          p.q_strides.row, work.seq_q - tile_row, p.head_dim, p.copy_bytes);
      rows.store(storage);
    }
    fetch_k(moving, keys.end_tile - 1);
    __syncthreads();
    load_rows<C::kHeadDim>(q, warp_tile + row_fragment<C::kHeadDim>(lane));
    __syncthreads();
    moving.store(storage);
    fetch_v(moving, keys.end_tile - 1);
    moving.store(storage + kTileBytes);
  }

  // The argument of the exponential, from q.k.
  __device__ __forceinline__ void modify_scores(Scores& s, int tile) const {
    if (plan.scores.mode != kScaled) scale_scores(s, plan.scores);
    const int row = warp_row + lane / 4, column = tile * C::kBlockK + lane % 4 * 2;
    if constexpr (kHasBiasMask)
      apply_bias_mask<Op>(s, BiasMaskView(p.bias_mask, place.batch0, place.batch1, place.head), row,
                          column, p.seq_q, p.seq_k, 1.f);
    if (keys.cut(tile)) mask_scores(s, window, row, column);
  }

  __device__ __forceinline__ void write(Output& o, const OfRows& row_max,
                                        const OfRows& row_sum) const {
    const int row = work.first_q + warp_row, rows = work.seq_q - warp_row;
    // Recomputed, not kept.
    const HeadCoord home(opaque(blockIdx.x), plan.tiles, p.heads_q, p.batch1);
    float* lse = p.lse + static_cast<int64_t>(home.batch_head) * p.seq_q + row;
#pragma unroll
    for (int m = 0; m < C::kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(row_sum[m][half]);
        const float inverse = sum == 0.f ? 0.f : 1.f / sum;
        const int i = m * 16 + half * 8 + lane / 4;
        if (lane % 4 == 0 && i < rows)
          lse[i] = sum == 0.f ? -INFINITY : fmaf(row_max[m][half], plan.lse_scale, logf(sum));
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

  __device__ __forceinline__ void run() const {
    Moving moving;
    Q q;
    Output o;
    OfRows row_max;  // in units of 1 / exp_scale; stale by <= 2^8
    OfRows row_sum;  // this lane's part of the sum
    set_zero(o);
#pragma unroll
    for (int m = 0; m < C::kM; ++m) {
      row_max[m][0] = row_max[m][1] = -INFINITY;
      row_sum[m][0] = row_sum[m][1] = 0.f;
    }
    uint32_t stage = 0;  // bytes to the stage of tile n
    if (keys.first_tile < keys.end_tile) load_q_and_first_tile(q, moving);
    const uint32_t k_start = storage + column_fragment<C::kHeadDim>(lane);
    const uint32_t v_start = storage + kTileBytes + row_fragment<C::kHeadDim>(lane);
#pragma unroll 1
    for (int tile = keys.end_tile - 1; tile >= keys.first_tile; --tile) {
      __syncthreads();  // K_n and V_n are stored; no warp still reads the other stage
      const bool active = keys.seen(tile);
      const bool more = tile > keys.first_tile;
      const uint32_t other = storage + (stage ^ (2 * kTileBytes));
      Scores s;
      if (more) fetch_k(moving, tile - 1);
      if (active) {
        set_zero(s);
        multiply_transposed<Op, C::kHeadDim>(s, q, k_start + stage);
      }
      if (more) {
        moving.store(other);
        fetch_v(moving, tile - 1);
      }
      if (active) {
        modify_scores(s, tile);
        online_softmax(s, o, row_max, row_sum, plan.scores.exp_scale);
        multiply_accumulators<Op, C::kHeadDim>(o, s, v_start + stage);
      }
      if (more) moving.store(other + kTileBytes);
      stage ^= 2 * kTileBytes;
    }
    __syncthreads();  // the stages are free for the output
    if (warp_row < work.seq_q) write(o, row_max, row_sum);
  }
};

template <class Op, class C, bool kVector, bool kHasBiasMask>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    forward_kernel(const __grid_constant__ FlashsciForwardParams p,
                   const __grid_constant__ ForwardPlan plan) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));

  const HeadCoord place(blockIdx.x, plan.tiles, p.heads_q, p.batch1);
  const QueryTile<C> work(blockIdx.x - place.batch_head * plan.tiles, plan.tiles, p);
  if (work.tile < 0 || work.tile * C::kBlockQ >= work.seq_q) return;
  Warp<Op, C, kVector, kHasBiasMask>(p, plan, place, work, shared).run();
}

}  // namespace flashsci::sm75::fwd
