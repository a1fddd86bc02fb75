// The gradient of a shared bias, reduced to the bias's own shape, without atomics.
//
// Maths     dbias = the sum of dS = P (dO V^T - delta) over the dims that the bias lacks.
// Roles     A CTA owns a tile of dbias, 64 to 128 rows x 32 to 64 keys (one row or one key, if the
//           bias has one), and adds up its members: the batches, heads, row tiles and key tiles
//           that share it. If tiles are few, `splits` CTAs share the members of one and leave
//           partial sums to bias_sum_kernel. All on grid.x. Four warps, 32 (D > 128: 16) query rows
//           each.
// Shared    kStages x (Q, dO, K, V): `BiasShared`; at the end the sums of the warps.
// Pipeline  With two stages the tiles of the next member are copied during the products of this
//           one.
// Limits    Two products a member and tile, and the loads from L2.
#pragma once
#include "../../core/bias_mask.cuh"
#include "../../core/dbias_reduce.cuh"
#include "../../core/poison.cuh"
#include "../../core/softmax.cuh"
#include "../../core/warp_mma.cuh"
#include "../bwd/config.cuh"

namespace flashsci::sm75::dbias {

using namespace bwd;  // this kernel is part of the backward

template <int kHeadDim_, int kBlockQ_, int kBlockK_, int kMinBlocks_>
struct BiasTiling {
  static constexpr int kHeadDim = kHeadDim_, kBlockQ = kBlockQ_, kBlockK = kBlockK_;
  static constexpr int kStages = 1, kMinBlocks = kMinBlocks_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kRows = kBlockQ / kWarps, kM = kRows / 16;
  static constexpr int kStep = 32, kN = kStep / 8;  // keys at a time
  static_assert(kRows % 16 == 0 && kBlockK % kStep == 0, "whole mma tiles");
};

// Rows row, row + 8 of each m16 block: -lse and -delta; rows past the last have no probability.
template <int kM>
__device__ __forceinline__ void load_row_statistics(float2 (&x)[kM][2],
                                                    const float2* __restrict__ statistics, int row,
                                                    int rows) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + m * 16 + half * 8;
      x[m][half] = i < rows ? __ldg(statistics + i) : make_float2(-INFINITY, 0.f);
    }
}

// C += A B^T over all columns: rows of A from a_start (by rows), rows of B from b_start (by
// chunks).
template <class Op, int kCols, int kM, int kN>
__device__ __forceinline__ void multiply_rows(float (&c)[kM][kN][4], uint32_t a_start,
                                              uint32_t b_start) {
  using T = Tile<kCols>;
#pragma unroll
  for (int d = 0; d < kCols / 16; ++d) {
    uint32_t a[kM][4];  // A [16 kM, 16]
#pragma unroll
    for (int m = 0; m < kM; ++m)
      ptx::ldmatrix_x4(a[m], T::pair_address(a_start, d) + m * 16 * T::kRowBytes);
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      uint32_t b[4];  // B [16, 16]: two n8 blocks
      ptx::ldmatrix_x4(b, T::pair_address(b_start, d) + n * 16 * T::kRowBytes);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        Op::mma(c[m][2 * n], a[m], b[0], b[1]);
        Op::mma(c[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

template <class C>
struct alignas(128) BiasShared {
  uint16_t q[C::kStages][C::kBlockQ * C::kHeadDim];     // [stage, kBlockQ, kHeadDim]
  uint16_t dout[C::kStages][C::kBlockQ * C::kHeadDim];  // [stage, kBlockQ, kHeadDim]
  uint16_t k[C::kStages][C::kBlockK * C::kHeadDim];     // [stage, kBlockK, kHeadDim]
  uint16_t v[C::kStages][C::kBlockK * C::kHeadDim];     // [stage, kBlockK, kHeadDim]
};

// The work of a warp: its place, and the steps of the loop over members; arrays are locals, as in
// the forward.
template <class Op, class C>
struct BiasWarp {
  using T = Tile<C::kHeadDim>;
  static constexpr int kN = C::kBlockK / 8;
  using Sums = float[C::kM][kN][4];       // dS summed over members: [m16, n8, fragment]
  using Scores = float[C::kM][C::kN][4];  // [m16, n8 of kStep keys, fragment]
  using Statistics = float2[C::kM][2];    // [m16, row g or g + 8]: -lse, -delta
  static constexpr int kStageQ = C::kBlockQ * T::kRowBytes, kStageK = C::kBlockK * T::kRowBytes;

  const FlashsciBackwardParams& p;
  const BackwardPlan& plan;
  const BiasPlan& bias;
  const BiasMember& own;
  const int warp, lane;
  const Window window;
  const uint32_t group;                              // query heads per key head
  const uint32_t q_tile, dout_tile, k_tile, v_tile;  // the first stages

  __device__ __forceinline__ BiasWarp(const FlashsciBackwardParams& p_, const BackwardPlan& plan_,
                                      const BiasPlan& bias_, const BiasMember& own_,
                                      BiasShared<C>& shared)
      : p(p_),
        plan(plan_),
        bias(bias_),
        own(own_),
        warp(ptx::redux_max(threadIdx.x / 32)),
        lane(threadIdx.x % 32),
        window(p.window_left, p.window_right, p.lower_right != 0, p.seq_q, p.seq_k),
        group(p.heads_q / p.heads_k),
        q_tile(ptx::shared_address(shared.q)),
        dout_tile(ptx::shared_address(shared.dout)),
        k_tile(ptx::shared_address(shared.k)),
        v_tile(ptx::shared_address(shared.v)) {}

  __device__ __forceinline__ BiasMember find(uint32_t number) const {
    BiasMember found;
    found.decode(number, bias.members);
#pragma unroll
    for (int i = 0; i < 5; ++i) found.index[i] += own.index[i];
    return found;
  }
  __device__ __forceinline__ void load(const BiasMember& x, int stage) const {
    const int row = x.index[3] * C::kBlockQ, key = x.index[4] * C::kBlockK;
    const uint32_t head = x.index[2], head_k = head / group;
    load_tile_rows<C, C::kBlockQ>(q_tile + stage * kStageQ, p.q, x.offset(p.q_strides, head),
                                  p.q_strides, row, p.seq_q - row, p.head_dim, p.copy_bytes,
                                  plan.vector);
    load_tile_rows<C, C::kBlockQ>(
        dout_tile + stage * kStageQ, p.dout, x.offset(p.dout_strides, head), p.dout_strides, row,
        p.dout != nullptr ? p.seq_q - row : 0, p.head_dim_v, p.copy_bytes, plan.vector);
    load_tile_rows<C, C::kBlockK>(k_tile + stage * kStageK, p.k, x.offset(p.k_strides, head_k),
                                  p.k_strides, key, p.seq_k - key, p.head_dim, p.copy_bytes,
                                  plan.vector);
    load_tile_rows<C, C::kBlockK>(v_tile + stage * kStageK, p.v, x.offset(p.v_strides, head_k),
                                  p.v_strides, key, p.seq_k - key, p.head_dim_v, p.copy_bytes,
                                  plan.vector);
  }

  // P and dP - delta of the kStep keys from `step` on in the tile. left: this lane's rows in a tile
  // of Q or dO.
  __device__ __forceinline__ void find_p_and_dp(Scores& s, Scores& dp, const Statistics& statistics,
                                                const BiasMaskView& view, uint32_t left, int stage,
                                                int step, int first_key, int warp_row,
                                                int warp_last_row) const {
    const int key = first_key + step;
    const uint32_t right =
        stage * kStageK + step * T::kRowBytes + column_fragment<C::kHeadDim>(lane);
    set_zero(s);
    multiply_rows<Op, C::kHeadDim>(s, q_tile + stage * kStageQ + left, k_tile + right);
    start_from_delta(dp, statistics);
    multiply_rows<Op, C::kHeadDim>(dp, dout_tile + stage * kStageQ + left, v_tile + right);
    if (plan.scores.mode != kScaled) modify_scores(s, dp, plan.scores, false);
    apply_bias_mask<Op>(s, view, warp_row + lane / 4, key + lane % 4 * 2, p.seq_q, p.seq_k,
                        plan.bias_factor);
    if (window.begin(warp_last_row) > key || window.end(warp_row) < key + C::kStep)
      mask_scores(s, window, warp_row + lane / 4, key + lane % 4 * 2);
    exponentiate(s, statistics, plan);
  }
  // Members [begin, end).
  __device__ __forceinline__ void run(Sums& sum, uint32_t begin, uint32_t end) const {
    set_zero(sum);
    if (C::kStages == 2) {
      load(find(begin), 0);
      ptx::cp_async_commit();
    }
    const uint32_t left = warp * C::kRows * T::kRowBytes + row_fragment<C::kHeadDim>(lane);
    int stage = 0;
    BiasMember member;
#pragma unroll 1
    for (uint32_t number = begin; number < end; ++number) {
      member = find(number);
      if constexpr (C::kStages == 1) {
        __syncthreads();  // no warp still reads the previous member
        load(member, 0);
        ptx::cp_async_commit();
      }
      const int warp_row = member.index[3] * C::kBlockQ + warp * C::kRows;
      const int warp_last_row = min(warp_row + C::kRows, p.seq_q) - 1;
      Statistics statistics;
      load_row_statistics(
          statistics,
          plan.statistics +
              ((member.index[0] * p.batch1 + member.index[1]) * p.heads_q + member.index[2]) *
                  p.seq_q,
          warp_row + lane / 4, p.seq_q);
      ptx::cp_async_wait<0>();
      __syncthreads();  // this stage is complete; no warp reads the other one
      if constexpr (C::kStages == 2) {
        if (number + 1 < end) load(find(number + 1), stage ^ 1);
        ptx::cp_async_commit();
      }
      const BiasMaskView view(p.bias_mask, member.index[0], member.index[1], member.index[2]);
#pragma unroll
      for (int step = 0; step < C::kBlockK; step += C::kStep) {
        const int first_key = member.index[4] * C::kBlockK, key = first_key + step;
        if (warp_row >= p.seq_q || key >= window.end(warp_last_row) ||
            key + C::kStep <= window.begin(warp_row))
          continue;
        Scores s, dp;
        find_p_and_dp(s, dp, statistics, view, left, stage, step, first_key, warp_row,
                      warp_last_row);
#pragma unroll
        for (int i = 0; i < C::kM * C::kN * 4; ++i) {
          const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
          sum[m][step / 8 + n][e] = fmaf(s[m][n][e], dp[m][n][e], sum[m][step / 8 + n][e]);
        }
      }
      if (C::kStages == 2) stage ^= 1;
    }
  }
};

template <class Op, class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    bias_gradient_kernel(const __grid_constant__ FlashsciBackwardParams p,
                         const __grid_constant__ BackwardPlan plan,
                         const __grid_constant__ BiasPlan bias) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<BiasShared<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));
  const uint32_t split = blockIdx.x % bias.splits;
  BiasMember own;
  own.decode(blockIdx.x / bias.splits, bias.own);
  const uint32_t begin = static_cast<uint64_t>(bias.member_count) * split / bias.splits;
  const uint32_t end = static_cast<uint64_t>(bias.member_count) * (split + 1) / bias.splits;

  const BiasWarp<Op, C> warp(p, plan, bias, own, shared);
  typename BiasWarp<Op, C>::Sums sum;
  warp.run(sum, begin, end);

  constexpr int kN = C::kBlockK / 8;
  // Sums over the rows or keys of the tile itself, if the bias has one row or key for all.
  const bool own_rows = p.dbias_strides.row != 0 || p.seq_q == 1;
  const bool own_keys = p.dbias_strides.column != 0 || p.seq_k == 1;
  const int own_row = own.index[3] * C::kBlockQ + warp.warp * C::kRows + warp.lane / 4;
  const int own_key = own.index[4] * C::kBlockK + warp.lane % 4 * 2;
  const int64_t base = own.offset(p.dbias_strides, own.index[2]);
  if (!own_keys) add_keys(sum);
  if (own_rows) {
#pragma unroll
    for (int i = 0; i < C::kM * kN * 4; ++i) {
      const int m = i / (4 * kN), n = i / 4 % kN, e = i % 4;
      const int row = own_row + m * 16 + e / 2 * 8, key = own_keys ? own_key + n * 8 + e % 2 : 0;
      if (row >= p.seq_q || key >= p.seq_k) continue;
      if (!own_keys && (n > 0 || e % 2 > 0 || warp.lane % 4 > 0)) continue;
      put_bias_sum<Op>(p, plan, bias, split,
                       base + row * p.dbias_strides.row + key * p.dbias_strides.column,
                       sum[m][n][e]);
    }
    return;
  }
  put_row_sums<Op, C>(sum, own, own_keys, split, warp.warp, warp.lane, p, plan, bias, base,
                      reinterpret_cast<float*>(shared_memory));
}

// dbias = the sum of the splits, in order.
template <class Op>
__global__ void __launch_bounds__(256, 4)
    bias_sum_kernel(const __grid_constant__ FlashsciBackwardParams p,
                    const __grid_constant__ BackwardPlan plan, uint32_t splits, int64_t elements) {
  sum_splits<Op>(p, plan, splits, elements);
}

}  // namespace flashsci::sm75::dbias
