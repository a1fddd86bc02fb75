// The forward of kernel.cuh with a bias or a mask.
//
// Maths     as there, with s_ij + bias_ij before the softmax and -inf where the mask hides.
// Roles     A unit of work is a query tile of kMembers neighbours along the dimension that shares
//           the bias. Up to D = 64 CTAs are persistent: each takes a run of units, the tiles side
//           by side, then the other members, so that a bias is read while it is in L2. Every warp
//           works on its rows of all members in turn and starts their scores from the one bias tile
//           that it has converted: S = Q K^T + bias / scale costs nothing beyond the product.
// Shared    Two stages of 32 keys: K and V of every member (interleaved, see core/smem_tile.cuh), the bias
//           tile, one byte a key of each member's key mask; Q of every member, of two units where
//           CTAs are persistent: `BiasMaskStorage`.
// Pipeline  The copies of the next stage fly while one is worked on, from one unit into the next;
//           one barrier a stage. Q stays in registers where it fits.
// Limits    Issue slots and exponentials at D = 32, HMMA from D = 64 on; a bias that is not shared:
//           HBM.
#pragma once
#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "../../core/launch.cuh"
#include "../../core/poison.cuh"
#include "bias_mask_load.cuh"
#include "bias_mask_tile.cuh"
#include "kernel.cuh"

namespace flashsci::sm80::fwd {

template <int kM, int kN>
__device__ __forceinline__ void copy(float (&x)[kM][kN][4], const float (&y)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i)
    x[i / (kN * 4)][i / 4 % kN][i % 4] = y[i / (kN * 4)][i / 4 % kN][i % 4];
}

template <int kM, int kN>
__device__ __forceinline__ void add(float (&x)[kM][kN][4], const float (&y)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i)
    x[i / (kN * 4)][i / 4 % kN][i % 4] += y[i / (kN * 4)][i / 4 % kN][i % 4];
}

// S += Q K^T with Q in registers.
template <class Op, class C>
__device__ __forceinline__ void multiply_kept_qk(float (&s)[C::kM][C::kN][4],
                                                 const uint32_t (&q)[C::kHeadDim / 16][C::kM][4],
                                                 uint32_t k_start) {
  using T = Tile<C::kHeadDim>;
#pragma unroll
  for (int d = 0; d < C::kHeadDim / 16; ++d) {
#pragma unroll
    for (int n = 0; n < C::kN / 2; ++n) {
      uint32_t b[4];  // K [16 keys, 16]: two n8 blocks
      ptx::ldmatrix_x4(b, T::pair_address(k_start, d) + n * 16 * T::kRowBytes);
#pragma unroll
      for (int m = 0; m < C::kM; ++m) {
        Op::mma(s[m][2 * n], q[d][m], b[0], b[1]);
        Op::mma(s[m][2 * n + 1], q[d][m], b[2], b[3]);
      }
    }
  }
}

// Normalises, writes lse and output from registers: the lanes of a quad exchange the words of four
// n8 blocks, so that each has 16 bytes in a row.
template <class Op, class C>
__device__ __forceinline__ void store_rows(const float (&o)[C::kM][C::kDimBlocks][4],
                                           const float (&row_max)[C::kM][2],
                                           const float (&row_sum)[C::kM][2],
                                           uint16_t* __restrict__ out,  // [rows, Dv] of this warp
                                           float* __restrict__ lse,     // [rows] of this warp
                                           int64_t row_stride, int rows, int head_dim_v,
                                           const ForwardPlan& plan) {
  const int group = threadIdx.x / 4 % 8, quad = threadIdx.x % 4;
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
      for (int block = 0; block < C::kDimBlocks / 4; ++block) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          word[i] = Op::pack2(o[m][block * 4 + i][half * 2] * inverse,
                              o[m][block * 4 + i][half * 2 + 1] * inverse);
        transpose_quad(word);
        const int columns = head_dim_v - (block * 4 + quad) * kChunkElements;
        uint16_t* target = out + row * row_stride + (block * 4 + quad) * kChunkElements;
        if (row >= rows || columns <= 0) continue;
        if (plan.vector_out) {
          *reinterpret_cast<uint4*>(target) = make_uint4(word[0], word[1], word[2], word[3]);
        } else {
#pragma unroll
          for (int e = 0; e < kChunkElements; ++e)
            if (e < columns) target[e] = static_cast<uint16_t>(word[e / 2] >> (e % 2 * 16));
        }
      }
    }
  }
}

template <class Op, class C, bool kVector>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    forward_bias_mask_kernel(const __grid_constant__ FlashsciForwardParams p,
                             const __grid_constant__ ForwardPlan plan,
                             const __grid_constant__ BiasMaskPlan bias_mask) {
  using T = Tile<C::kHeadDim>;
  using Stage = BiasMaskStage<C>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<BiasMaskStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));
  constexpr int kMembers = C::kMembers;
  constexpr bool kAnything = C::kBias == 0;

  const int seq_q = p.seq_q, seq_k = p.seq_k;
  const int warp = ptx::redux_max(threadIdx.x / 32);
  const int lane = threadIdx.x % 32;
  const Window window(kAnything ? p.window_left : -1, kAnything ? p.window_right : -1,
                      p.lower_right != 0, seq_q, seq_k);

  uint32_t unit = blockIdx.x * bias_mask.units + min(blockIdx.x, bias_mask.units_rest);
  const uint32_t end_unit = unit + bias_mask.units + (blockIdx.x < bias_mask.units_rest);
  BiasMaskFetch<C, kVector> fetch(shared, unit, end_unit);
  fetch.seek(shared, p, plan, bias_mask, window);
  fetch.issue(shared, p, plan, bias_mask, window);
  ptx::cp_async_commit();

  uint32_t stage = ptx::shared_address(shared.stage);
#pragma unroll 1
  for (; unit < end_unit; ++unit) {
    const BiasMaskPlace place(unit, kMembers, p, plan, bias_mask);
    const int tile_row = place.tile * C::kBlockQ, warp_row = tile_row + warp * C::kRows;
    const KeyTiles<C> tiles(window, tile_row, seq_q);
    // Of the keys, some rows of this warp see [seen_begin, seen_end), all [full_begin, full_end).
    const int warp_last_row = min(warp_row + C::kRows, seq_q) - 1;
    const int seen_begin = window.begin(warp_row);
    const int seen_end = warp_row < seq_q ? window.end(warp_last_row) : 0;
    const int full_begin = window.begin(warp_last_row), full_end = window.end(warp_row);
    const uint8_t* mask = p.bias_mask.mask;  // of pairs
    if (kAnything && mask != nullptr) mask += place.offset(p.bias_mask.mask_strides, place.head);

    struct Rows {
      float o[C::kM][C::kDimBlocks][4];  // [m16, n8 of Dv, fragment]
      float row_max[C::kM][2];  // [m16, row g or g + 8], in units of 1 / exp_scale; stale by <= 2^8
      float row_sum[C::kM][2];  // this lane's part of the sum
    } rows[kMembers];
#pragma unroll
    for (int r = 0; r < kMembers; ++r) {
      clear(rows[r].o);
#pragma unroll
      for (int m = 0; m < C::kM; ++m) {
        rows[r].row_max[m][0] = rows[r].row_max[m][1] = -INFINITY;
        rows[r].row_sum[m][0] = rows[r].row_sum[m][1] = 0.f;
      }
    }
    const uint32_t q_start = ptx::shared_address(shared.q[unit % C::kUnitsQ]) +
                             warp * C::kRows * T::kRowBytes + T::offset(lane % 16, lane / 16);
    constexpr int kQBytes = C::kBlockQ * T::kRowBytes;
    constexpr int kKeptQ = C::kKeepQ ? C::kHeadDim / 16 : 1;
    uint32_t q_kept[kMembers][kKeptQ][C::kM][4];  // Q [kRows, D] of each member

#pragma unroll 1
    for (int tile = tiles.end - 1; tile >= tiles.first; --tile) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // this stage has landed; nobody reads the one before any more
      if (C::kKeepQ && tile == tiles.end - 1) {
#pragma unroll
        for (int i = 0; i < kMembers * kKeptQ * C::kM; ++i) {
          const int r = i / (kKeptQ * C::kM), d = i / C::kM % kKeptQ, m = i % C::kM;
          ptx::ldmatrix_x4(q_kept[r][d][m],
                           T::pair_address(q_start, d) + r * kQBytes + m * 16 * T::kRowBytes);
        }
        // The next copies may be of the Q after the next: into the place of this one.
        if (tile == tiles.first) __syncthreads();
      }
      fetch.issue(shared, p, plan, bias_mask, window);
      ptx::cp_async_commit();

      const int first_key = tile * C::kBlockK;
      const bool active = first_key < seen_end && first_key + C::kBlockK > seen_begin;
      const int row = warp_row + opaque(lane) / 4, key = first_key + opaque(lane) % 4 * 8;
      uint32_t words[kMembers][C::kN / 2];  // of the key masks
      bool any_shown[kMembers], any_hidden[kMembers];
#pragma unroll
      for (int r = 0; r < kMembers; ++r) {
        any_shown[r] = active && r < place.count;
        any_hidden[r] = false;
        if (bias_mask.key_mask) {
          bool shown;
          read_key_mask<C>(words[r], stage + offsetof(Stage, shown) + r * C::kBlockK, shown,
                           any_hidden[r]);
          any_shown[r] &= shown;
        }
      }
      float c[C::kM][C::kN][4];  // what the scores start from
      const uint32_t bias_tile = stage + offsetof(Stage, bias);
      if (kAnything && p.bias_mask.bias == nullptr)
        clear(c);
      else if (C::kBias == 4 || (kAnything && p.bias_mask.bias_is_fp32))
        read_bias<Op, C, true>(c, bias_tile + bias_start<C, true>(warp), bias_mask.bias_factor);
      else
        read_bias<Op, C, false>(c, bias_tile + bias_start<C, false>(warp), bias_mask.bias_factor);
      if (kAnything && active && mask != nullptr && !bias_mask.key_mask)
        hide_bias_mask<C>(c, mask, p.bias_mask.mask_strides, bias_mask.aligned_mask != 0, row, key,
                          seq_q, seq_k);
      const uint32_t k_start = stage + T::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
      const uint32_t v_start = stage + offsetof(Stage, v) + T::offset(lane % 16, lane / 16);
      constexpr int kTileBytes = C::kBlockK * T::kRowBytes;
#pragma unroll
      for (int r = 0; r < kMembers; ++r) {
        if (!any_shown[r]) continue;
        float s[C::kM][C::kN][4];  // [m16, n8 of keys, fragment]: scores, then P
        const auto multiply = [&] {
          if constexpr (C::kKeepQ)
            multiply_kept_qk<Op, C>(s, q_kept[r], k_start + r * kTileBytes);
          else
            multiply_qk<Op, C>(s, q_start + r * kQBytes, k_start + r * kTileBytes);
        };
        if (!kAnything || plan.score_mode == kScaled) {
          copy(s, c);
          multiply();
        } else {
          clear(s);
          multiply();
          scale_scores<C>(s, plan);
          add(s, c);
        }
        if (any_hidden[r]) hide_keys<C>(s, words[r]);
        if (first_key < full_begin || first_key + C::kBlockK > full_end)
          mask_scores<true>(s, window, row, key);
        online_softmax_lazily(s, rows[r].o, rows[r].row_max, rows[r].row_sum, plan.exp_scale);
        multiply_pv<Op, C>(rows[r].o, s, v_start + r * kTileBytes);
      }
      stage = next_stage<C>(stage, shared);
    }

    if (warp_row >= seq_q) continue;
    const BiasMaskPlace home(opaque(unit), kMembers, p, plan,
                             bias_mask);  // not kept through the loop
    auto* out = static_cast<uint16_t*>(p.out) + home.offset(p.out_strides, home.head) +
                warp_row * p.out_strides.row;
    float* lse =
        p.lse + ((home.batch0 * p.batch1 + home.batch1) * p.heads_q + home.head) * seq_q + warp_row;
#pragma unroll
    for (int r = 0; r < kMembers; ++r) {
      if (r >= home.count) break;
      store_rows<Op, C>(rows[r].o, rows[r].row_max, rows[r].row_sum, out + r * bias_mask.out_step,
                        lse + r * bias_mask.lse_step, p.out_strides.row, seq_q - warp_row,
                        p.head_dim_v, plan);
    }
  }
}

}  // namespace flashsci::sm80::fwd
