// Forward attention in fp32 on fp16 tensor cores (Ampere and newer).
//
// Maths     As sm80/fwd/kernel.cuh. Products of fp32 are three products of fp16 halves
//           (core/split_fp16.cuh), or one in TF32 precision; everything else is fp32.
// Roles     One CTA per (query tile, head, batch), all on grid.x. Each of kWarps warps owns 16 kM
//           query rows; all threads make K and V into halves, a row or a part of one each.
// Shared    Halves of Q (raw at first; scaled row by row), of K and of V; raw K and V of the next
//           tile: `ForwardStorage`.
// Pipeline  Raw K_n-1 and V_n-1 fly, and the bias of tile n - 1 on its way to registers, while tile
//           n is worked on; two barriers a tile: raw tile there, halves there.
// Limits    HMMA and everything else take turns rather than overlap: docs/kernels/sm80_fp32.md.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../core/head_coord.cuh"
#include "../../core/launch.cuh"
#include "../../core/mask.cuh"
#include "../../core/poison.cuh"
#include "../../core/softmax.cuh"
#include "../../core/varlen.cuh"
#include "../../include/flashsci.h"
#include "../fp32/bias_mask.cuh"
#include "../fp32/rows.cuh"
#include "../fp32/stream.cuh"
#include "../fp32/warp_mma.cuh"

namespace flashsci::sm80::fwd_fp32 {

template <int kDim_, int kWarps_, int kM_, int kN_, int kMinBlocks_>
struct ForwardTile {
  static constexpr int kDim = kDim_, kWarps = kWarps_, kM = kM_, kN = kN_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kM * 16;  // query rows of a warp
  static constexpr int kBlockQ = kRows * kWarps, kBlockK = kN * 8;
  static constexpr int kDimBlocks = kDim / 8;
};

template <class C>
struct alignas(128) ForwardStorage {
  SplitFp16Tile<C::kBlockQ, C::kDim> q;
  StreamStorage<C::kBlockK, C::kDim, C::kThreads> stream;
  float q_factor[C::kBlockQ];  // what to multiply the halves of a row of Q by
};

// What the host derives from the parameters, once.
struct ForwardFp32Plan {
  uint32_t tiles;  // grid slots of one head
  int vector;      // rows of Q, K and V take 16-byte copies
  int plain;       // scores are what is exponentiated, up to a positive factor
  float inner;     // factor of the scores: to units of log2 if plain, to natural ones or those
                   // of the cap if not

  float cap;       // softcap or 0
  int vector_out;  // output rows take 8-byte stores
  BiasMaskAccess bias_mask;
};

// P is exponentiated to at most 2^15: 2^kShift at the running maximum, which may be stale.
inline constexpr float kShift = 11.f, kStale = 4.f;
inline constexpr float kLowest = -3.4028234664e38f;  // finite: hidden keys stay at -inf below it

// s = cap tanh(factor s), of factor 1 then.
template <int kM, int kN>
__device__ __forceinline__ void cap_scores(float (&s)[kM][kN][4], float (&factor)[kM][2],
                                           float cap) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][n][e] = cap * tanh_accurate(factor[m][e / 2] * s[m][n][e]);
  set_all(factor, 1.f);
}

// S, times the row's factor in the units of row_max, becomes P times 2^kShift. These units are
// natural ones with a bias (whose lowest numbers overflow in others), those of log2 without. The
// factor is used up.
template <bool kNatural, int kM, int kN, int kDimBlocks>
__device__ __forceinline__ void online_softmax_fp32(float (&s)[kM][kN][4],
                                                    float (&o)[kM][kDimBlocks][4],
                                                    float (&row_max)[kM][2],
                                                    float (&row_sum)[kM][2],
                                                    float (&factor)[kM][2]) {
  constexpr float kUnit = kNatural ? kLog2e : 1.f;  // to those of log2
  float tile_max[kM][2];
  bool grew = false;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = fmaxf(s[m][0][half * 2], s[m][0][half * 2 + 1]);
#pragma unroll
      for (int n = 1; n < kN; ++n) x = fmaxf(x, fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
      tile_max[m][half] = quad_max(x) * factor[m][half];
      grew |= (tile_max[m][half] - row_max[m][half]) * kUnit > kStale;
    }
  }
  if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(row_max[m][half], tile_max[m][half]);
        const float alpha =
            next == -INFINITY ? 1.f : ptx::ex2_approx((row_max[m][half] - next) * kUnit);
        row_max[m][half] = next;
        row_sum[m][half] *= alpha;
#pragma unroll
        for (int d = 0; d < kDimBlocks; ++d) {
          o[m][d][half * 2] *= alpha;
          o[m][d][half * 2 + 1] *= alpha;
        }
      }
    }
  }
  float offset[kM][2];
  bool large = false;
#pragma unroll
  for (int i = 0; i < kM * 2; ++i) {
    const float maximum = row_max[i / 2][i % 2] * kUnit;
    offset[i / 2][i % 2] = maximum == -INFINITY ? 0.f : maximum;
    large |= row_max[i / 2][i % 2] != -INFINITY && fabsf(maximum) > kExactExponent;
  }
  if (__any_sync(0xffffffffu, large)) {
    // Rounded as the maximum is, or the difference of large numbers would be anything.
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) {
      const int m = i / (4 * kN), half = i % 4 / 2;
      float& x = s[m][i / 4 % kN][i % 4];
      x = __fsub_rn(__fmul_rn(x, factor[m][half]), fmaxf(row_max[m][half], kLowest));
    }
    set_all(factor, 1.f);
    set_all(offset, 0.f);
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = half * 2; e < half * 2 + 2; ++e) {
          s[m][n][e] =
              ptx::ex2_approx(fmaf(s[m][n][e], factor[m][half] * kUnit, kShift - offset[m][half]));
          sum += s[m][n][e];
        }
      }
      row_sum[m][half] += sum;
    }
  }
}

template <class C, bool kHasBiasMask>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    forward_fp32_kernel(const __grid_constant__ FlashsciForwardParams p,
                        const __grid_constant__ ForwardFp32Plan plan) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<ForwardStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));
  using QTile = SplitFp16Tile<C::kBlockQ, C::kDim>;
  using KTile = SplitFp16Tile<C::kBlockK, C::kDim>;
  constexpr int kTogether = C::kM * C::kDim >= 128 ? 2 : 4;  // registers

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
  const auto* k = static_cast<const float*>(p.k) + place.offset(p.k_strides, head_k) +
                  work.first_k * p.k_strides.row;
  const auto* v = static_cast<const float*>(p.v) + place.offset(p.v_strides, head_k) +
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

  const uint32_t q_start = start_of_a<QTile>(ptx::shared_address(&shared.q), warp * C::kRows);
  constexpr bool kZerosApart = !kHasBiasMask && C::kDim == 64;
  Stream<C::kBlockK, C::kDim, C::kThreads, kZerosApart> stream(shared.stream);
  const uint32_t k_mixed = start_of_rows<KTile>(stream.tile(0), true);
  const uint32_t k_high = start_of_rows<KTile>(stream.tile(0), false);
  const uint32_t v_mixed = start_of_dims<KTile>(stream.tile(1), true);
  const uint32_t v_high = start_of_dims<KTile>(stream.tile(1), false);
  const bool three = p.precision == FLASHSCI_TF32X3;

  const auto load = [&](int tile) {
    const int first = tile * C::kBlockK;
    stream.load(0, k + first * p.k_strides.row, p.k_strides.row, work.seq_k - first, p.head_dim,
                plan.vector != 0);
    stream.load(1, v + first * p.v_strides.row, p.v_strides.row, work.seq_k - first, p.head_dim_v,
                plan.vector != 0);
  };

  float o[C::kM][C::kDimBlocks][4];  // [m16, n8 of Dv, fragment]
  float row_max[C::kM][2];   // [m16, row g or g + 8], natural or log2 units; stale by <= kStale
  float row_sum[C::kM][2];   // this lane's part of the sum
  float q_factor[C::kM][2];  // from halves of Q, and units of the scores, to the plan's
#pragma unroll
  for (int m = 0; m < C::kM; ++m) {
    row_max[m][0] = row_max[m][1] = -INFINITY;
    row_sum[m][0] = row_sum[m][1] = 0.f;
#pragma unroll
    for (int d = 0; d < C::kDimBlocks; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[m][d][e] = 0.f;
  }

  const BiasMaskOfHead<> bias_mask(p.bias_mask, plan.bias_mask, place, place.head, work.seq_q,
                                   work.seq_k);
  BiasMaskTile<kHasBiasMask ? C::kM : 1, kHasBiasMask ? C::kN : 2> pair_tile;
  if (first_tile < end_tile) {
    if constexpr (kHasBiasMask)
      pair_tile.load(bias_mask, warp_row + lane / 4, (end_tile - 1) * C::kBlockK + lane % 4 * 4);
    const uint32_t q_tile = ptx::shared_address(&shared.q);
    load_raw<C::kBlockQ, C::kDim, C::kThreads, false>(
        q_tile,
        static_cast<const float*>(p.q) + place.offset(p.q_strides, place.head) +
            (work.first_q + tile_row) * p.q_strides.row,
        p.q_strides.row, work.seq_q - tile_row, p.head_dim, plan.vector != 0);
    ptx::cp_async_commit();
    load(end_tile - 1);
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    __syncthreads();
    convert_in_place<C::kBlockQ, C::kDim, C::kThreads>(q_tile, shared.q_factor);
    __syncthreads();
#pragma unroll
    for (int m = 0; m < C::kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        q_factor[m][half] =
            shared.q_factor[warp * C::kRows + m * 16 + half * 8 + lane / 4] * plan.inner;
  }

#pragma unroll 1
  for (int tile = end_tile - 1; tile >= first_tile; tile -= stream.again ? 0 : 1) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the raw tile has landed; nobody reads the halves of tile n + 1 any more
    stream.convert();
    if (!stream.again && tile > first_tile) load(tile - 1);
    ptx::cp_async_commit();
    const int first_key = tile * C::kBlockK;
    const int next_key = stream.again ? first_key : first_key - C::kBlockK;
    if (first_key < seen_end && first_key + C::kBlockK > seen_begin) {
      float s[C::kM][C::kN][4];  // [m16, n8 of keys, fragment]: scores, then P
      multiply_rows<QTile, KTile, C::kDim>(s, opaque(q_start), opaque(k_mixed), opaque(k_high),
                                           three);
      float factor[C::kM][2];  // from s to the units of row_max
#pragma unroll
      for (int m = 0; m < C::kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) factor[m][half] = q_factor[m][half] * stream.factor(0);
      if (plan.plain) {
        keep_finite(factor);
      } else {
        if (plan.cap != 0.f) cap_scores(s, factor, plan.cap);
        if constexpr (kHasBiasMask) {
          pair_tile.apply(s, bias_mask, factor);
        } else {
          scale_rows(s, factor);
        }
        set_all(factor, kHasBiasMask ? 1.f : kLog2e);
      }
      if (stream.hide) hide_columns(s, stream.shared.state, lane % 4 * 4);
      if (first_key < full_begin || first_key + C::kBlockK > full_end)
        mask_interleaved(s, window, warp_row + lane / 4, first_key + lane % 4 * 4);
      if constexpr (kHasBiasMask) {
        if (next_key >= first_tile * C::kBlockK)
          pair_tile.load(bias_mask, warp_row + lane / 4, next_key + lane % 4 * 4);
      }
      online_softmax_fp32<kHasBiasMask>(s, o, row_max, row_sum, factor);
      if constexpr (!kZerosApart) drop_zero_rows(s, stream.shared.state, lane % 4 * 4, 1);
      Operand<C::kM, C::kN> probabilities;
      probabilities.take(s, three);
      set_all(factor, stream.factor(1));
      multiply_dims<KTile, C::kDim, kTogether>(o, probabilities, opaque(v_mixed), opaque(v_high),
                                               factor, three);
    } else if constexpr (kHasBiasMask) {
      if (next_key >= first_tile * C::kBlockK)
        pair_tile.load(bias_mask, warp_row + lane / 4, next_key + lane % 4 * 4);
    }
  }

  if (warp_row >= work.seq_q) return;
  // Found again rather than kept through the loop.
  const HeadCoord home(opaque(blockIdx.x), plan.tiles, p.heads_q, p.batch1);
  int row = warp_row;
  if (p.cu_seqlens_q != nullptr)
    row += find_tile<C::kBlockQ>(opaque(blockIdx.x) - home.batch_head * plan.tiles, p.cu_seqlens_q,
                                 p.cu_seqlens_k, p.num_seqs, p.seq_q, p.seq_k)
               .first_q;
  float* lse = p.lse + static_cast<int64_t>(home.batch_head) * p.seq_q + row;
  float inverse[C::kM][2];
#pragma unroll
  for (int m = 0; m < C::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(row_sum[m][half]);
      inverse[m][half] = sum == 0.f ? 0.f : 1.f / sum;
      const int of_warp = m * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0 && of_warp < work.seq_q - warp_row)
        lse[of_warp] = sum == 0.f ? -INFINITY
                                  : fmaf(row_max[m][half], kHasBiasMask ? 1.f : kLn2,
                                         logf(sum * exp2f(-kShift)));
    }
  }
  store_rows_fp32(
      o, inverse,
      static_cast<float*>(p.out) + home.offset(p.out_strides, home.head) + row * p.out_strides.row,
      p.out_strides.row, work.seq_q - warp_row, p.head_dim_v, plan.vector_out != 0);
}

}  // namespace flashsci::sm80::fwd_fp32
