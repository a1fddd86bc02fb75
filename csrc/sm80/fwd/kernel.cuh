// Forward attention for tensor cores of the mma.sync generation (Ampere, Ada; Hopper until its
// own).
//
// Maths     o_i = sum_j p_ij v_j / l_i, p_ij = exp(s_ij - m_i), l_i = sum_j p_ij, lse_i = m_i + log
//           l_i, s = scale q k^T or softcap tanh(scale q k^T / softcap), over the keys the window
//           shows.
// Roles     One CTA per (query tile, head, batch), all on grid.x, the tiles of a head side by side
//           and the longest first. kWarps warps own kBlockQ / kWarps query rows each and never talk
//           about values: they share only the K and V tiles. Packed calls find their sequence on
//           the device.
// Shared    Q (later the output), kStages x K, kStages x V, all swizzled 16-byte chunks:
//           `SharedStorage`.
// Pipeline  kStages 1: V_n flies during S = Q K_n^T, K_n-1 flies during softmax and P V_n; two
//           barriers a tile, and the other CTA of the SM fills the gaps. kStages 2: K_n-1 and V_n-1
//           fly during all of tile n; one barrier a tile. Tiles go from the diagonal to the left.
// Limits    HMMA issue with shared-memory reads of K and V close behind (32 rows per warp: a
//           fragment feeds two mma), then exp: docs/kernels/sm80_forward.md.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../core/launch.cuh"
#include "../../core/mask.cuh"
#include "../../core/poison.cuh"
#include "../../core/smem_tile.cuh"
#include "../../core/softmax.cuh"
#include "../../core/varlen.cuh"
#include "../../include/flashsci.h"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/redux.cuh"
#include "../../ptx/shared.cuh"

namespace flashsci::sm80::fwd {

static_assert(std::is_trivially_copyable_v<FlashsciForwardParams>, "passed to the kernel by value");

#ifndef FLASHSCI_TILE_PRESET
#define FLASHSCI_TILE_PRESET 1
#endif
// What one block may take: t4_safe fits Turing's 64 KiB, ampere_balanced the 99 KiB of sm_86 and
// sm_89.
#if FLASHSCI_TILE_PRESET == 0
inline constexpr int kSharedBudget = 64 * 1024;
#else
inline constexpr int kSharedBudget = 99 * 1024;
#endif

template <int kHeadDim_, int kBlockQ_, int kBlockK_, int kWarps_, int kStages_, int kMinBlocks_>
struct Tiling {
  static constexpr int kHeadDim = kHeadDim_, kBlockQ = kBlockQ_, kBlockK = kBlockK_;
  static constexpr int kWarps = kWarps_, kStages = kStages_, kMinBlocks = kMinBlocks_;
  using TwoStages = Tiling<kHeadDim_, kBlockQ_, kBlockK_, kWarps_, 2, kMinBlocks_>;
  // The same for rows that take no 16-byte copies: the copies need registers.
  using Unaligned =
      Tiling<kHeadDim_, kBlockQ_, kHeadDim_ == 128 ? 32 : kBlockK_, kWarps_, 1, kMinBlocks_>;
  static constexpr bool kFewRegisters =
      kStages == 2 || kBlockK > 64 || (kHeadDim == 128 && kBlockQ == 128);
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kBlockQ / kWarps;   // query rows of a warp
  static constexpr int kM = kRows / 16;            // m16 blocks of a warp
  static constexpr int kN = kBlockK / 8;           // n8 blocks of S
  static constexpr int kDimBlocks = kHeadDim / 8;  // n8 blocks of O
  static_assert(kRows % 16 == 0 && kBlockK % 16 == 0 && kHeadDim % 32 == 0, "whole mma tiles");
};

struct Shape {
  int block_q, block_k, warps, min_blocks;
};

// Tile shape of a padded head dimension; measured in docs/kernels/sm80_forward.md. 32 rows a warp
// as long as the accumulators (rows x (keys + dims) / 32 registers) leave room, two CTAs an SM to
// fill each other's gaps.
constexpr Shape shape_of(int head_dim) {
  if (FLASHSCI_TILE_PRESET == 0)
    return head_dim <= 128 ? Shape{128, 64, 4, 2} : Shape{64, 32, 4, 2};
  if (head_dim <= 64) return {128, 128, 4, 2};
  if (head_dim <= 128) return {128, 64, 4, 2};
  return {64, 64, 4, 2};
}

template <int kHeadDim>
using Tiles = Tiling<kHeadDim, shape_of(kHeadDim).block_q, shape_of(kHeadDim).block_k,
                     shape_of(kHeadDim).warps, 1, shape_of(kHeadDim).min_blocks>;

// When no sequence has more than 64 queries: half the rows, and more CTAs an SM to hide latencies.
template <int kHeadDim>
using SmallTiles = Tiling<kHeadDim, 64, 64, 4, 1, kHeadDim <= 64 ? 4 : 3>;

template <class C>
struct alignas(128) SharedStorage {
  uint16_t q[C::kBlockQ * C::kHeadDim];              // [kBlockQ, kHeadDim], then the output tile
  uint16_t k[C::kStages][C::kBlockK * C::kHeadDim];  // [stage, kBlockK, kHeadDim]
  uint16_t v[C::kStages][C::kBlockK * C::kHeadDim];  // [stage, kBlockK, kHeadDim]
};

// What the host derives from the parameters, once.
struct ForwardPlan {
  uint32_t tiles;     // grid slots of one head
  int score_mode;     // how raw q.k becomes what is exponentiated: ScoreMode
  float score_inner;  // kLinear: s *= inner; kSoftcap: s = outer * tanh(inner * s)
  float score_outer;
  float exp_scale;  // log2(e) times what is left to multiply by
  float lse_scale;  // from the units of the running maximum to natural log
  int vector_out;   // output rows take 16-byte stores
};

enum ScoreMode { kScaled = 0, kLinear = 1, kSoftcap = 2 };

template <class C>
__device__ __forceinline__ void scale_scores(float (&s)[C::kM][C::kN][4], const ForwardPlan& plan) {
  if (plan.score_mode == kSoftcap) {
#pragma unroll
    for (int m = 0; m < C::kM; ++m)
#pragma unroll
      for (int n = 0; n < C::kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[m][n][e] = plan.score_outer * tanh_accurate(plan.score_inner * s[m][n][e]);
  } else {
#pragma unroll
    for (int m = 0; m < C::kM; ++m)
#pragma unroll
      for (int n = 0; n < C::kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] *= plan.score_inner;
  }
}

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&x)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][n][e] = 0.f;
}

// S += Q K^T for the rows of one warp.
template <class Op, class C>
__device__ __forceinline__ void multiply_qk(float (&s)[C::kM][C::kN][4], uint32_t q_start,
                                            uint32_t k_start) {
  using T = Tile<C::kHeadDim>;
#pragma unroll
  for (int d = 0; d < C::kHeadDim / 16; ++d) {
    uint32_t a[C::kM][4];  // Q [kRows, 16]
#pragma unroll
    for (int m = 0; m < C::kM; ++m)
      ptx::ldmatrix_x4(a[m], T::pair_address(q_start, d) + m * 16 * T::kRowBytes);
#pragma unroll
    for (int n = 0; n < C::kN / 2; ++n) {
      uint32_t b[4];  // K [16 keys, 16]: two n8 blocks
      ptx::ldmatrix_x4(b, T::pair_address(k_start, d) + n * 16 * T::kRowBytes);
#pragma unroll
      for (int m = 0; m < C::kM; ++m) {
        Op::mma(s[m][2 * n], a[m], b[0], b[1]);
        Op::mma(s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// O += P V; the accumulator layout of S is the operand layout of P.
template <class Op, class C>
__device__ __forceinline__ void multiply_pv(float (&o)[C::kM][C::kDimBlocks][4],
                                            const float (&p)[C::kM][C::kN][4], uint32_t v_start) {
  using T = Tile<C::kHeadDim>;
#pragma unroll
  for (int n = 0; n < C::kN / 2; ++n) {
    uint32_t a[C::kM][4];  // P [kRows, 16 keys]
#pragma unroll
    for (int m = 0; m < C::kM; ++m) {
      a[m][0] = Op::pack2(p[m][2 * n][0], p[m][2 * n][1]);
      a[m][1] = Op::pack2(p[m][2 * n][2], p[m][2 * n][3]);
      a[m][2] = Op::pack2(p[m][2 * n + 1][0], p[m][2 * n + 1][1]);
      a[m][3] = Op::pack2(p[m][2 * n + 1][2], p[m][2 * n + 1][3]);
    }
#pragma unroll
    for (int d = 0; d < C::kDimBlocks / 2; ++d) {
      uint32_t b[4];  // V [16 keys, 16 columns]: two n8 blocks
      ptx::ldmatrix_x4_trans(b, T::pair_address(v_start, d) + n * 16 * T::kRowBytes);
#pragma unroll
      for (int m = 0; m < C::kM; ++m) {
        Op::mma(o[m][2 * d], a[m], b[0], b[1]);
        Op::mma(o[m][2 * d + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Normalises, writes lse, and sends the rows of one warp to global memory through its part of the Q
// tile.
template <class Op, class C>
__device__ __forceinline__ void write_output(float (&o)[C::kM][C::kDimBlocks][4],
                                             const float (&row_max)[C::kM][2],
                                             const float (&row_sum)[C::kM][2], uint32_t warp_tile,
                                             uint16_t* __restrict__ out,  // [rows, Dv] of this warp
                                             float* __restrict__ lse,     // [rows] of this warp
                                             int64_t row_stride, int rows, int head_dim_v,
                                             const ForwardPlan& plan) {
  using T = Tile<C::kHeadDim>;
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  __syncwarp();  // all lanes have read their last Q fragments
#pragma unroll
  for (int m = 0; m < C::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(row_sum[m][half]);
      const float inverse = sum == 0.f ? 0.f : 1.f / sum;
      const int row = m * 16 + half * 8 + group;
      if (quad == 0 && row < rows)
        lse[row] = sum == 0.f ? -INFINITY : fmaf(row_max[m][half], plan.lse_scale, logf(sum));
#pragma unroll
      for (int d = 0; d < C::kDimBlocks; ++d)
        ptx::st_shared(warp_tile + T::offset(row, d) + quad * 4,
                       Op::pack2(o[m][d][half * 2] * inverse, o[m][d][half * 2 + 1] * inverse));
    }
  }
  __syncwarp();
  constexpr int kLanesPerRow = T::kGroup;
#pragma unroll
  for (int pass = 0; pass < C::kRows * kLanesPerRow / 32; ++pass) {
    const int row = pass * (32 / kLanesPerRow) + lane / kLanesPerRow;
    if (row >= rows) break;
#pragma unroll
    for (int block = 0; block < T::kChunks / kLanesPerRow; ++block) {
      const int chunk = lane % kLanesPerRow + block * kLanesPerRow;
      const int columns = head_dim_v - chunk * kChunkElements;
      uint16_t* target = out + row * row_stride + chunk * kChunkElements;
      if (columns <= 0) continue;
      const uint4 value = ptx::ld_shared_v4(warp_tile + T::offset(row, chunk));
      if (plan.vector_out) {
        *reinterpret_cast<uint4*>(target) = value;
      } else {
        const uint32_t word[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int e = 0; e < kChunkElements; ++e)
          if (e < columns) target[e] = static_cast<uint16_t>(word[e / 2] >> (e % 2 * 16));
      }
    }
  }
}

// Which head of which batch a block works on.
struct QueryTileCoord {
  uint32_t batch_head, batch0, batch1, head;

  __device__ __forceinline__ QueryTileCoord(uint32_t block, const FlashsciForwardParams& p,
                                            const ForwardPlan& plan) {
    batch_head = block / plan.tiles;
    const uint32_t batch = batch_head / static_cast<uint32_t>(p.heads_q);
    head = batch_head - batch * static_cast<uint32_t>(p.heads_q);
    batch0 = batch / static_cast<uint32_t>(p.batch1);
    batch1 = batch - batch0 * static_cast<uint32_t>(p.batch1);
  }
  // Elements from the start of a tensor, in 64 bits.
  __device__ __forceinline__ int64_t offset(const FlashsciStrides& strides,
                                            uint32_t of_head) const {
    return batch0 * strides.batch0 + batch1 * strides.batch1 + of_head * strides.head;
  }
};

template <class Op, class C, bool kVector>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    forward_kernel(const __grid_constant__ FlashsciForwardParams p,
                   const __grid_constant__ ForwardPlan plan) {
  using T = Tile<C::kHeadDim>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));

  // Which query tile of which head.
  const QueryTileCoord place(blockIdx.x, p, plan);
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

  const auto* q = static_cast<const uint16_t*>(p.q) + place.offset(p.q_strides, place.head) +
                  (work.first_q + tile_row) * p.q_strides.row;
  const uint32_t head_k = place.head / static_cast<uint32_t>(p.heads_q / p.heads_k);
  const auto* k = static_cast<const uint16_t*>(p.k) + place.offset(p.k_strides, head_k) +
                  work.first_k * p.k_strides.row;
  const auto* v = static_cast<const uint16_t*>(p.v) + place.offset(p.v_strides, head_k) +
                  work.first_k * p.v_strides.row;

  const int warp = ptx::redux_max(threadIdx.x / 32);
  const int lane = threadIdx.x % 32;
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

  const uint32_t q_tile = ptx::shared_address(shared.q);
  const uint32_t k_tile = ptx::shared_address(shared.k);
  const uint32_t v_tile = ptx::shared_address(shared.v);
  constexpr int kStageBytes = C::kBlockK * T::kRowBytes;
  // The two registers of a B operand are neighbours: K fetches 8 keys x 2 chunks for each n8 block,
  // V (through the transpose) 16 keys x 1 chunk.
  const uint32_t q_start =
      q_tile + warp * C::kRows * T::kRowBytes + T::offset(lane % 16, lane / 16);
  uint32_t k_start = k_tile + T::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  uint32_t v_start = v_tile + T::offset(lane % 16, lane / 16);

  const auto load_k = [&](int tile, int stage) {
    const int first = tile * C::kBlockK;
    load_tile<C::kBlockK, C::kHeadDim, C::kThreads, kVector, C::kFewRegisters>(
        k_tile + stage * kStageBytes, k + first * p.k_strides.row, p.k_strides.row,
        work.seq_k - first, p.head_dim, p.copy_bytes);
  };
  const auto load_v = [&](int tile, int stage) {
    const int first = tile * C::kBlockK;
    load_tile<C::kBlockK, C::kHeadDim, C::kThreads, kVector, C::kFewRegisters>(
        v_tile + stage * kStageBytes, v + first * p.v_strides.row, p.v_strides.row,
        work.seq_k - first, p.head_dim_v, p.copy_bytes);
  };

  float o[C::kM][C::kDimBlocks][4];  // [m16, n8 of Dv, fragment]
  float row_max[C::kM][2];  // [m16, row g or g + 8], in units of 1 / exp_scale; stale by <= 2^8
  float row_sum[C::kM][2];  // this lane's part of the sum
  clear(o);
#pragma unroll
  for (int m = 0; m < C::kM; ++m) {
    row_max[m][0] = row_max[m][1] = -INFINITY;
    row_sum[m][0] = row_sum[m][1] = 0.f;
  }

  if (first_tile < end_tile) {
    load_tile<C::kBlockQ, C::kHeadDim, C::kThreads, kVector, C::kFewRegisters>(
        q_tile, q, p.q_strides.row, work.seq_q - tile_row, p.head_dim, p.copy_bytes);
    load_k(end_tile - 1, 0);
    if (C::kStages == 2) load_v(end_tile - 1, 0);
    ptx::cp_async_commit();
  }
  int stage = 0;
#pragma unroll 1
  for (int tile = end_tile - 1; tile >= first_tile; --tile) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // K_n has landed; nobody reads V_n+1 (nor, with two stages, K_n+1) any more
    if constexpr (C::kStages == 1) {
      load_v(tile, 0);
    } else if (tile > first_tile) {
      load_k(tile - 1, stage ^ 1);
      load_v(tile - 1, stage ^ 1);
    }
    ptx::cp_async_commit();

    const int first_key = tile * C::kBlockK;
    const bool active = first_key < seen_end && first_key + C::kBlockK > seen_begin;
    float s[C::kM][C::kN][4];  // [m16, n8 of keys, fragment]: scores, then P
    if (active) {
      clear(s);
      multiply_qk<Op, C>(s, q_start, k_start);
    }
    if constexpr (C::kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // V_n has landed; nobody reads K_n any more
      if (tile > first_tile) load_k(tile - 1, 0);
      ptx::cp_async_commit();
    }
    if (active) {
      if (plan.score_mode != kScaled) scale_scores<C>(s, plan);
      if (first_key < full_begin || first_key + C::kBlockK > full_end)
        mask_scores(s, window, warp_row + lane / 4, first_key + lane % 4 * 2);
      online_softmax(s, o, row_max, row_sum, plan.exp_scale);
      multiply_pv<Op, C>(o, s, v_start);
    }
    if constexpr (C::kStages == 2) {
      stage ^= 1;
      k_start += stage != 0 ? kStageBytes : -kStageBytes;
      v_start += stage != 0 ? kStageBytes : -kStageBytes;
    }
  }

  if (warp_row >= work.seq_q) return;
  const int row = work.first_q + warp_row;
  const QueryTileCoord home(opaque(blockIdx.x), p,
                            plan);  // found again rather than kept through the loop
  auto* out = static_cast<uint16_t*>(p.out) + home.offset(p.out_strides, home.head) +
              row * p.out_strides.row;
  float* lse = p.lse + static_cast<int64_t>(home.batch_head) * p.seq_q + row;
  write_output<Op, C>(o, row_max, row_sum, q_tile + warp * C::kRows * T::kRowBytes, out, lse,
                      p.out_strides.row, work.seq_q - warp_row, p.head_dim_v, plan);
}

}  // namespace flashsci::sm80::fwd
