// The gradient of a shared bias, in fp32: reduced to the bias's own shape, without atomics.
//
// Maths     dbias = the sum of dS = P (dO V^T - delta) over the dims that the bias lacks,
//           times the slope of a softcap that bounds the bias.
// Roles     A CTA owns a tile of dbias (one row or one key, if the bias has one) and adds up its
//           members: the batches, heads, row tiles and key tiles that share it. If tiles are few,
//           `splits` CTAs share the members of one and leave partial sums to bias_sum_fp32_kernel.
// Shared    As bwd_fp32/kernel.cuh; at the end the sums of the warps.
// Pipeline  None inside a CTA: the other CTAs of the SM work while one waits for its tiles.
// Limits    Two products and four conversions to halves for each member and tile.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../../core/coord.cuh"
#include "../../core/dbias_reduce.cuh"
#include "../../core/mask.cuh"
#include "../../core/poison.cuh"
#include "../../core/softmax.cuh"
#include "../../include/flashsci.h"
#include "../bwd_fp32/config.cuh"
#include "../fp32_common/bias_mask.cuh"
#include "../fp32_common/rows.cuh"
#include "../fp32_common/stream.cuh"
#include "../fp32_common/warp_mma.cuh"

namespace flashsci::sm80::dbias_fp32 {

using namespace bwd_fp32;  // this kernel is part of the backward

struct BiasFp32Plan : BiasPlan {
  float* sums;  // [splits, elements], if splits > 1
};

// A warp of the CTA: its rows of the tile of dbias, and its part of the copies and of the
// conversions. `run` is the loop over members, `add` adds one member. Arrays are stored elsewhere:
// the compiler keeps scalars in the same object as arrays in memory until it has unrolled the loops
// over them.
template <class C>
struct BiasGradientWarp {
  using RowTile = SplitFp16Tile<C::kBlockRows, C::kDim>;
  using ColumnTile = SplitFp16Tile<C::kBlockColumns, C::kDim>;
  using KeyStream = Stream<C::kBlockColumns, C::kDim, C::kThreads>;
  using PairTile = BiasMaskTile<C::kM, C::kN>;
  using Scores = float[C::kM][C::kN][4];  // [m16, n8, fragment]
  using Statistics = float2[C::kM][2];    // lse in log2 units, delta
  static constexpr int kToV = sizeof(ColumnTile);

  const FlashsciBackwardParams& p;
  const BackwardFp32Plan& plan;
  const BiasFp32Plan& bias;
  BackwardStorage<C>& shared;
  const BiasMember& own;
  const uint32_t split;
  const int warp, lane;
  const Window window;
  const bool three;
  KeyStream& stream;
  const uint32_t q_tile, dout_tile, q_start, dout_start;
  const uint32_t k_mixed, k_high;  // in the halves of the stream
  Scores& sum;                     // dS summed over members

  __device__ __forceinline__ BiasGradientWarp(BackwardStorage<C>& shared_,
                                              const FlashsciBackwardParams& p_,
                                              const BackwardFp32Plan& plan_,
                                              const BiasFp32Plan& bias_, const BiasMember& own_,
                                              uint32_t split_, KeyStream& stream_, Scores& sum_)
      : p(p_),
        plan(plan_),
        bias(bias_),
        shared(shared_),
        own(own_),
        split(split_),
        warp(ptx::redux_max(threadIdx.x / 32)),
        lane(threadIdx.x % 32),
        window(p.window_left, p.window_right, p.lower_right != 0, p.seq_q, p.seq_k),
        three(p.precision == FLASHSCI_TF32X3),
        stream(stream_),
        q_tile(ptx::shared_address(&shared.x)),
        dout_tile(ptx::shared_address(&shared.y)),
        q_start(start_of_a<RowTile>(q_tile, warp * C::kRows)),
        dout_start(start_of_a<RowTile>(dout_tile, warp * C::kRows)),
        k_mixed(start_of_rows<ColumnTile>(stream.tile(0), true)),
        k_high(start_of_rows<ColumnTile>(stream.tile(0), false)),
        sum(sum_) {}

  // --- loads

  __device__ __forceinline__ void load(const HeadCoord& place, int tile_row, int tile_key) {
    const uint32_t head_k = place.head / static_cast<uint32_t>(p.heads_q / p.heads_k);
    __syncthreads();  // no warp still reads the previous member
    load_raw<C::kBlockRows, C::kDim, C::kThreads, false>(
        q_tile, rows_of(p.q, p.q_strides, place, place.head, tile_row), p.q_strides.row,
        p.seq_q - tile_row, p.head_dim, plan.vector != 0);
    load_raw<C::kBlockRows, C::kDim, C::kThreads, false>(
        dout_tile, rows_of(p.dout, p.dout_strides, place, place.head, tile_row), p.dout_strides.row,
        p.dout != nullptr ? p.seq_q - tile_row : 0, p.head_dim_v, plan.vector != 0);
    stream.load(0, rows_of(p.k, p.k_strides, place, head_k, tile_key), p.k_strides.row,
                p.seq_k - tile_key, p.head_dim, plan.vector != 0);
    stream.load(1, rows_of(p.v, p.v_strides, place, head_k, tile_key), p.v_strides.row,
                p.seq_k - tile_key, p.head_dim_v, plan.vector != 0);
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void load_statistics(Statistics& statistics, const HeadCoord& place,
                                                  int warp_row) const {
    const float2* of_rows =
        plan.statistics +
        ((place.batch0 * p.batch1 + place.batch1) * p.heads_q + place.head) * p.seq_q + warp_row;
#pragma unroll
    for (int i = 0; i < C::kM * 2; ++i) {
      const int row = i * 8 + lane / 4;
      statistics[i / 2][i % 2] =
          warp_row + row < p.seq_q ? __ldg(of_rows + row) : make_float2(INFINITY, 0.f);
    }
  }
  __device__ __forceinline__ void convert() {
    if (!stream.again) {
      convert_in_place<C::kBlockRows, C::kDim, C::kThreads>(q_tile, shared.x_factor);
      convert_in_place<C::kBlockRows, C::kDim, C::kThreads>(dout_tile, shared.y_factor);
    }
    stream.convert();
  }

  // --- a member

  // Softcap, bias and mask; afterwards s in natural units is the exponent. If the softcap bounds the
  // bias, it is `tanh_code` of it: there is no register for the slope.
  __device__ __forceinline__ void modify_scores(Scores& s, const PairTile& pair_tile,
                                                const BiasMaskOfHead<>& bias_mask) const {
    float factor[C::kM][2];
#pragma unroll
    for (int i = 0; i < C::kM * 2; ++i)
      factor[i / 2][i % 2] =
          shared.x_factor[warp * C::kRows + i * 8 + lane / 4] * plan.inner * stream.factor(0);
    const bool capped = p.bias_mask.capped != 0;
    if (plan.cap != 0.f && !capped) {
#pragma unroll
      for (int i = 0; i < C::kM * C::kN * 4; ++i) {
        float& x = s[i / (4 * C::kN)][i / 4 % C::kN][i % 4];
        x = plan.cap * tanh_accurate(factor[i / (4 * C::kN)][i % 4 / 2] * x);
      }
      set_all(factor, 1.f);
    }
    pair_tile.add(s, bias_mask, factor);
    if (capped) {
#pragma unroll
      for (int i = 0; i < C::kM * C::kN * 4; ++i) {
        float& x = s[i / (4 * C::kN)][i / 4 % C::kN][i % 4];
        x = tanh_code(x * plan.inverse_cap);
      }
    }
    pair_tile.hide(s, bias_mask);
    if (stream.hide) hide_columns(s, stream.shared.state, lane % 4 * 4);
  }
  // S becomes P, or P times the slope of a softcap that bounds the bias.
  __device__ __forceinline__ void exponentiate(Scores& s, const Statistics& statistics) const {
    if (p.bias_mask.capped) {
#pragma unroll
      for (int i = 0; i < C::kM * C::kN * 4; ++i) {
        float& code = s[i / (4 * C::kN)][i / 4 % C::kN][i % 4];
        const float exponent =
            fmaf(plan.cap * tanh_of(code), kLog2e, -statistics[i / (4 * C::kN)][i % 4 / 2].x);
        // -inf is hidden, or has no slope.
        code = code == -INFINITY ? 0.f : fminf(ptx::ex2_approx(exponent), 1.f) * slope_of(code);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < C::kM * C::kN * 4; ++i) {
      const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
      s[m][n][e] = ptx::ex2_approx(fmaf(s[m][n][e], kLog2e, -statistics[m][e / 2].x));
    }
    if (any_large(statistics)) limit_probabilities(s);
  }
  // dS = P (dP - delta).
  __device__ __forceinline__ void add(const Scores& probabilities, const Statistics& statistics) {
    Scores dp;
    multiply_rows<RowTile, ColumnTile, C::kDim>(dp, dout_start, k_mixed + kToV, k_high + kToV,
                                                three);
    float factor[C::kM][2];
#pragma unroll
    for (int i = 0; i < C::kM * 2; ++i)
      factor[i / 2][i % 2] = shared.y_factor[warp * C::kRows + i * 8 + lane / 4];
#pragma unroll
    for (int i = 0; i < C::kM * C::kN * 4; ++i) {
      const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
      // One factor after the other: their product may underflow.
      const float difference =
          fmaf(dp[m][n][e] * factor[m][e / 2], stream.factor(1), -statistics[m][e / 2].y);
      sum[m][n][e] = fmaf(probabilities[m][n][e], difference, sum[m][n][e]);
    }
  }

  // --- sums

  __device__ __forceinline__ void write_rows(float* target, bool own_keys) const {
    const int own_row = own.index[3] * C::kBlockRows + warp * C::kRows + lane / 4;
    const int own_key = own.index[4] * C::kBlockColumns + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < C::kM * C::kN * 4; ++i) {
      const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
      const int row = own_row + m * 16 + e / 2 * 8;
      const int key = own_keys ? own_key + n / 2 * 16 + n % 2 * 2 + e % 2 : 0;
      if (row >= p.seq_q || key >= p.seq_k) continue;
      if (!own_keys && (n > 0 || e % 2 > 0 || lane % 4 > 0)) continue;
      target[row * p.dbias_strides.row + key * p.dbias_strides.column] = sum[m][n][e];
    }
  }
  // If the bias has one row for all: the sums over the rows of the tile.
  __device__ __forceinline__ void write_sums_of_rows(float* target, bool own_keys) const {
    auto* warp_sums = reinterpret_cast<float*>(&shared);  // [warp, key of the tile]
    __syncthreads();                                      // no warp still reads Q
#pragma unroll
    for (int i = 0; i < C::kN * 2; ++i) {
      float x = 0.f;
#pragma unroll
      for (int j = 0; j < C::kM * 2; ++j) x += sum[j / 2][i / 2][j % 2 * 2 + i % 2];
      x += __shfl_xor_sync(0xffffffffu, x, 4);
      x += __shfl_xor_sync(0xffffffffu, x, 8);
      x += __shfl_xor_sync(0xffffffffu, x, 16);
      if (lane < 4) warp_sums[warp * C::kBlockColumns + i / 4 * 16 + lane * 4 + i % 4] = x;
    }
    __syncthreads();
    for (int column = threadIdx.x; column < (own_keys ? C::kBlockColumns : 1);
         column += C::kThreads) {
      const int key = own.index[4] * C::kBlockColumns + column;
      if (key >= p.seq_k) break;
      float x = 0.f;
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) x += warp_sums[w * C::kBlockColumns + column];
      target[key * p.dbias_strides.column] = x;
    }
  }
  __device__ __forceinline__ void write() {
    const bool own_rows = p.dbias_strides.row != 0 || p.seq_q == 1;
    const bool own_keys = p.dbias_strides.column != 0 || p.seq_k == 1;
    float* target =
        bias.splits > 1 ? bias.sums + split * bias.elements : static_cast<float*>(p.dbias);
    target += own.offset(p.dbias_strides, own.index[2]);
    if (!own_keys) add_keys(sum);
    if (own_rows)
      write_rows(target, own_keys);
    else
      write_sums_of_rows(target, own_keys);
  }

  __device__ __forceinline__ void run(uint32_t begin, uint32_t end) {
#pragma unroll 1
    for (uint32_t number = begin; number < end; number += stream.again ? 0 : 1) {
      BiasMember member;
      member.decode(number, bias.members);
#pragma unroll
      for (int i = 0; i < 5; ++i) member.index[i] += own.index[i];
      const int tile_row = member.index[3] * C::kBlockRows,
                tile_key = member.index[4] * C::kBlockColumns;
      HeadCoord place(0, 1, 1, 1);
      place.batch0 = member.index[0], place.batch1 = member.index[1], place.head = member.index[2];
      const int warp_row = tile_row + warp * C::kRows;
      const int warp_last_row = min(warp_row + C::kRows, p.seq_q) - 1;
      const int last_row = min(tile_row + C::kBlockRows, p.seq_q) - 1;
      if (window.begin(tile_row) >= tile_key + C::kBlockColumns || window.end(last_row) <= tile_key)
        continue;  // for the whole CTA: no key of the tile is visible

      Statistics statistics;
      PairTile pair_tile;
      const BiasMaskAccess access = plan.bias_mask.of_dense();
      const BiasMaskOfHead<> bias_mask(p.bias_mask, access, place, place.head, p.seq_q, p.seq_k);
      if (!stream.again) load(place, tile_row, tile_key);
      pair_tile.load(bias_mask, warp_row + lane / 4, tile_key + lane % 4 * 4);
      load_statistics(statistics, place, warp_row);
      ptx::cp_async_wait<0>();
      __syncthreads();
      convert();
      if (warp_row >= p.seq_q || tile_key >= window.end(warp_last_row) ||
          tile_key + C::kBlockColumns <= window.begin(warp_row))
        continue;

      Scores s;
      multiply_rows<RowTile, ColumnTile, C::kDim>(s, q_start, k_mixed, k_high, three);
      modify_scores(s, pair_tile, bias_mask);
      if (window.begin(warp_last_row) > tile_key ||
          window.end(warp_row) < tile_key + C::kBlockColumns)
        mask_interleaved(s, window, warp_row + lane / 4, tile_key + lane % 4 * 4);
      exponentiate(s, statistics);
      add(s, statistics);
    }
    write();
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    bias_gradient_fp32_kernel(const __grid_constant__ FlashsciBackwardParams p,
                              const __grid_constant__ BackwardFp32Plan plan,
                              const __grid_constant__ BiasFp32Plan bias) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<BackwardStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));
  const uint32_t split = blockIdx.x % bias.splits;
  BiasMember own;
  own.decode(blockIdx.x / bias.splits, bias.own);
  const uint32_t begin = static_cast<uint64_t>(bias.member_count) * split / bias.splits;
  const uint32_t end = static_cast<uint64_t>(bias.member_count) * (split + 1) / bias.splits;
  using Warp = BiasGradientWarp<C>;
  typename Warp::KeyStream stream(shared.stream);
  typename Warp::Scores sum;
  clear(sum);
  Warp(shared, p, plan, bias, own, split, stream, sum).run(begin, end);
}

// dbias = the sum of the splits, in order.
__global__ void __launch_bounds__(256, 6)
    bias_sum_fp32_kernel(float* __restrict__ dbias, const float* __restrict__ sums, uint32_t splits,
                         int64_t elements) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < elements;
       i += int64_t{256} * gridDim.x) {
    float x = 0.f;
    for (uint32_t split = 0; split < splits; ++split) x += sums[split * elements + i];
    dbias[i] = x;
  }
}

}  // namespace flashsci::sm80::dbias_fp32
