// Forward attention for tensor cores of the mma.sync generation (Ampere, Ada; Hopper until its
// own).
//
// Maths     o_i = sum_j p_ij v_j / l_i, p_ij = exp(s_ij - m_i), l_i = sum_j p_ij,
//           lse_i = m_i + log l_i, s = scale q k^T or softcap tanh(scale q k^T / softcap), over the
//           keys the window shows.
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

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "../common/place.cuh"
#include "../common/product.cuh"
#include "../common/ptx/cp_async.cuh"
#include "../common/ptx/redux.cuh"
#include "../common/scores.cuh"
#include "../common/sequence.cuh"
#include "../common/softmax.cuh"
#include "../common/store_rows.cuh"
#include "../common/tile.cuh"
#include "../common/window.cuh"
#include "../include/flashsci.h"

namespace flashsci::sm80 {

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
  uint32_t tiles;  // grid slots of one head
  ScorePlan scores;
  int vector_out;  // output rows take 16-byte stores
};

// Normalises, writes lse, and sends the rows of one warp to global memory through its part of the Q
// tile.
template <class Op, class C>
__device__ __forceinline__ void write_output(const float (&o)[C::kM][C::kDimBlocks][4],
                                             const float (&row_max)[C::kM][2],
                                             const float (&row_sum)[C::kM][2], uint32_t warp_tile,
                                             uint16_t* __restrict__ out,  // [rows, Dv] of this warp
                                             float* __restrict__ lse,     // [rows] of this warp
                                             int64_t row_stride, int rows, int head_dim_v,
                                             const ForwardPlan& plan) {
  const int lane = threadIdx.x % 32;
  float inverse[C::kM][2];
#pragma unroll
  for (int i = 0; i < C::kM * 2; ++i) {
    const int row = i * 8 + lane / 4;
    const float sum = quad_sum(row_sum[i / 2][i % 2]);
    inverse[i / 2][i % 2] = sum == 0.f ? 0.f : 1.f / sum;
    if (lane % 4 == 0 && row < rows)
      lse[row] =
          sum == 0.f ? -INFINITY : fmaf(row_max[i / 2][i % 2], plan.scores.lse_scale, logf(sum));
  }
  store_rows<Op, C::kHeadDim>(o, inverse, warp_tile, out, row_stride, rows, head_dim_v,
                              plan.vector_out != 0);
}

template <class Op, class C, bool kVector>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    forward_kernel(const __grid_constant__ FlashsciForwardParams p,
                   const __grid_constant__ ForwardPlan plan) {
  using T = Tile<C::kHeadDim>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<C>*>(shared_memory);

  // Which query tile of which head.
  const Place place(blockIdx.x, plan.tiles, p.heads_q, p.batch1);
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
  const uint32_t q_start =
      q_tile + warp * C::kRows * T::kRowBytes + row_fragment<C::kHeadDim>(lane);
  uint32_t k_start = k_tile + column_fragment<C::kHeadDim>(lane);
  uint32_t v_start = v_tile + row_fragment<C::kHeadDim>(lane);

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
  set_zero(o);
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
      set_zero(s);
      multiply_tiles<Op, C::kHeadDim>(s, q_start, k_start);
    }
    if constexpr (C::kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // V_n has landed; nobody reads K_n any more
      if (tile > first_tile) load_k(tile - 1, 0);
      ptx::cp_async_commit();
    }
    if (active) {
      scale_scores(s, plan.scores);
      if (first_key < full_begin || first_key + C::kBlockK > full_end)
        mask_scores(s, window, warp_row + lane / 4, first_key + lane % 4 * 2);
      online_softmax(s, o, row_max, row_sum, plan.scores.exp_scale);
      multiply_accumulators<Op, C::kHeadDim>(o, s, v_start);
    }
    if constexpr (C::kStages == 2) {
      stage ^= 1;
      k_start += stage != 0 ? kStageBytes : -kStageBytes;
      v_start += stage != 0 ? kStageBytes : -kStageBytes;
    }
  }

  if (warp_row >= work.seq_q) return;
  const int row = work.first_q + warp_row;
  // Found again rather than kept through the loop.
  const Place home(opaque(blockIdx.x), plan.tiles, p.heads_q, p.batch1);
  auto* out = static_cast<uint16_t*>(p.out) + home.offset(p.out_strides, home.head) +
              row * p.out_strides.row;
  float* lse = p.lse + static_cast<int64_t>(home.batch_head) * p.seq_q + row;
  write_output<Op, C>(o, row_max, row_sum, q_tile + warp * C::kRows * T::kRowBytes, out, lse,
                      p.out_strides.row, work.seq_q - warp_row, p.head_dim_v, plan);
}

inline ForwardPlan plan_of(const FlashsciForwardParams& p, int64_t tiles) {
  ForwardPlan plan;
  plan.tiles = static_cast<uint32_t>(tiles);
  plan.scores = plan_scores(p.scale, p.softcap, false);
  const auto aligned = [](int64_t stride) { return stride % kChunkElements == 0; };
  plan.vector_out = p.head_dim_v % kChunkElements == 0 && aligned(p.out_strides.batch0) &&
                    aligned(p.out_strides.batch1) && aligned(p.out_strides.head) &&
                    aligned(p.out_strides.row) && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  return plan;
}

template <auto kKernel, int kSharedBytes, int kThreads, class... Arguments>
cudaError_t launch_kernel(int device, int64_t blocks, cudaStream_t stream,
                          const Arguments&... arguments) {
  if (kSharedBytes > 48 * 1024) {
    // Once per device; a lost race only repeats it.
    static std::atomic<uint64_t> configured{0};
    const uint64_t bit = uint64_t{1} << (device & 63);
    if (device >= 64 || !(configured.load(std::memory_order_relaxed) & bit)) {
      const cudaError_t error =
          cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      if (error != cudaSuccess) return error;
      configured.fetch_or(bit, std::memory_order_relaxed);
    }
  }
  kKernel<<<static_cast<unsigned>(blocks), kThreads, kSharedBytes, stream>>>(arguments...);
  return cudaGetLastError();
}

template <class Op, class C, bool kVector>
cudaError_t launch_tiling(const FlashsciForwardParams& p, cudaStream_t stream) {
  static_assert(
      sizeof(SharedStorage<C>) == (C::kBlockQ + 2 * C::kStages * C::kBlockK) * C::kHeadDim * 2,
      "the plan has no padding");
  static_assert(sizeof(SharedStorage<C>) <= kSharedBudget, "over the budget of the tile preset");
  const int64_t tiles = p.cu_seqlens_q != nullptr
                            ? num_slots<C::kBlockQ>(p.seq_q, p.num_seqs)
                            : (int64_t{p.seq_q} + C::kBlockQ - 1) / C::kBlockQ;
  const int64_t blocks = tiles * p.heads_q * p.batch0 * p.batch1;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX || p.batch0 * p.batch1 > INT32_MAX) return cudaErrorInvalidValue;
  return launch_kernel<forward_kernel<Op, C, kVector>, sizeof(SharedStorage<C>), C::kThreads>(
      p.device, blocks, stream, p, plan_of(p, tiles));
}

// Two stages where two such CTAs fit an SM, and registers allow (D <= 128); else one.
template <class Op, class C>
cudaError_t launch_padded(const FlashsciForwardParams& p, cudaStream_t stream) {
  const bool vector =
      p.copy_bytes >= 16 && p.head_dim % kChunkElements == 0 && p.head_dim_v % kChunkElements == 0;
  if (!vector) return launch_tiling<Op, typename C::Unaligned, false>(p, stream);
  if constexpr (C::kHeadDim <= 128) {
    using Small = SmallTiles<C::kHeadDim>;
    const int longest = p.cu_seqlens_q != nullptr ? p.max_seqlen_q : p.seq_q;
    if (longest >= 0 && longest <= Small::kBlockQ) return launch_tiling<Op, Small, true>(p, stream);
  }
  using TwoStages = typename C::TwoStages;
  if constexpr (C::kHeadDim <= 128 && sizeof(SharedStorage<TwoStages>) <= kSharedBudget) {
    constexpr int kReserved = 1024;  // per CTA, by the system
    if (C::kMinBlocks * (sizeof(SharedStorage<TwoStages>) + kReserved) <=
        static_cast<size_t>(p.shared_per_sm))
      return launch_tiling<Op, TwoStages, true>(p, stream);
  }
  return launch_tiling<Op, C, true>(p, stream);
}

// Picks the smallest padded head dimension that holds D and Dv.
template <class Op>
cudaError_t launch_forward(const FlashsciForwardParams& p, cudaStream_t stream) {
  if (p.pairs.bias != nullptr || p.pairs.mask != nullptr) return cudaErrorNotSupported;
  const int dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  if (dim <= 32) return launch_padded<Op, Tiles<32>>(p, stream);
  if (dim <= 64) return launch_padded<Op, Tiles<64>>(p, stream);
  if (dim <= 96) return launch_padded<Op, Tiles<96>>(p, stream);
  if (dim <= 128) return launch_padded<Op, Tiles<128>>(p, stream);
  if (dim <= 192) return launch_padded<Op, Tiles<192>>(p, stream);
  if (dim <= 256) return launch_padded<Op, Tiles<256>>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace flashsci::sm80
