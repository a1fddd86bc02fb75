// The gradient of a shared bias, reduced to the bias's own shape, without atomics.
//
// Maths     dbias = the sum of dS = P (dO V^T - delta) over the dims that the bias lacks, times the
//           slope of a softcap that bounds the bias; dropout as in bwd/bias_mask_kernel.cuh.
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
#include "../../core/dbias_reduce.cuh"
#include "../../core/poison.cuh"
#include "../dq/kernel.cuh"

namespace flashsci::sm80::dbias {

using namespace bwd;  // this kernel is part of the backward
using namespace dq;

template <int kHeadDim_, int kBlockQ_, int kBlockK_, int kStages_, int kMinBlocks_>
struct BiasTiling : QueryTiling<kHeadDim_, kBlockQ_, kBlockK_, kStages_, kMinBlocks_> {};

template <class C>
struct alignas(128) BiasShared {
  uint16_t q[C::kStages][C::kBlockQ * C::kHeadDim];     // [stage, kBlockQ, kHeadDim]
  uint16_t dout[C::kStages][C::kBlockQ * C::kHeadDim];  // [stage, kBlockQ, kHeadDim]
  uint16_t k[C::kStages][C::kBlockK * C::kHeadDim];     // [stage, kBlockK, kHeadDim]
  uint16_t v[C::kStages][C::kBlockK * C::kHeadDim];     // [stage, kBlockK, kHeadDim]
  float2 statistics[C::kStages][C::kBlockQ];            // [stage, kBlockQ]: -lse, -delta
  alignas(16) uint8_t shown[2][C::kBlockK];             // [member % 2, kBlockK]: a mask of keys
};

// Adds the bias to scores that could not start from it, columns from n8 block `first` of it. capped:
// before the softcap, whose slope dP - delta takes then. scale: of q.k.
template <int kM, int kN, int kAll>
__device__ __forceinline__ void add_late(float (&s)[kM][kN][4], float (&dp)[kM][kN][4],
                                         const float (&addend)[kM][kAll][4], int first,
                                         const BackwardPlan& plan, bool capped, float scale) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) {
    float& x = s[i / (4 * kN)][i / 4 % kN][i % 4];
    const float y = addend[i / (4 * kN)][first + i / 4 % kN][i % 4];
    const float inner = plan.scores.inner * (capped ? fmaf(scale, x, y) : x);
    float shaped = inner, slope = 1.f;
    if (plan.scores.mode == kSoftcap) shaped = plan.scores.outer * tanh_accurate(inner, slope);
    const bool hidden = x == -INFINITY;
    x = (hidden ? x : shaped) + (capped && y != -INFINITY ? 0.f : y);
    if (capped) dp[i / (4 * kN)][i / 4 % kN][i % 4] *= hidden ? 0.f : slope;
  }
}

// The state of a thread through the members of one tile of dbias.
template <class Op, class C, class Drop>
struct BiasGradient {
  using T = Tile<C::kHeadDim>;
  static constexpr int kN = C::kBlockK / 8;  // n8 blocks of the tile; C::kN: of a step
  static constexpr int kStageQ = C::kBlockQ * T::kRowBytes, kStageK = C::kBlockK * T::kRowBytes;
  using TileSums = float[C::kM][kN][4];     // [m16, n8, fragment]
  using StepTile = float[C::kM][C::kN][4];  // the same, of a step
  using Statistics = float2[C::kM][2];      // [m16, row g or g + 8]: -lse, -delta

  BiasShared<C>& shared;
  const FlashsciBackwardParams& p;
  const BackwardPlan& plan;
  const BiasPlan& bias;
  const BiasMember& own;
  const uint32_t split;
  const Drop dropping;
  const int warp = ptx::redux_max(threadIdx.x / 32), lane = threadIdx.x % 32;
  const Window window{p.window_left, p.window_right, p.lower_right != 0, p.seq_q, p.seq_k};
  const uint32_t group = plan.group;
  const uint32_t q_tile = ptx::shared_address(shared.q);
  const uint32_t dout_tile = ptx::shared_address(shared.dout);
  const uint32_t k_tile = ptx::shared_address(shared.k), v_tile = ptx::shared_address(shared.v);
  const int own_row = own.index[3] * C::kBlockQ + warp * C::kRows + lane / 4;  // this lane's first
  const int own_key = own.index[4] * C::kBlockK + lane % 4 * 2;
  // A mask that is the same for all queries is loaded one byte per thread, one member ahead.
  const bool key_mask = p.bias_mask.mask != nullptr && p.bias_mask.mask_strides.row == 0;
  const bool pair_mask = p.bias_mask.mask != nullptr && p.bias_mask.mask_strides.row != 0;

  // --- loads

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
    load_row_statistics<C::kBlockQ>(
        shared.statistics[stage],
        plan.statistics + ((x.index[0] * p.batch1 + x.index[1]) * p.heads_q + head) * p.seq_q + row,
        p.seq_q - row);
  }
  // This thread's byte of a mask of keys.
  __device__ __forceinline__ int load_shown(const BiasMember& x) const {
    const int key = x.index[4] * C::kBlockK + threadIdx.x;
    return key_mask && threadIdx.x < C::kBlockK && key < p.seq_k
               ? __ldg(p.bias_mask.mask + x.offset(p.bias_mask.mask_strides, x.index[2]) +
                       key * p.bias_mask.mask_strides.column)
               : 1;
  }
  // The bias, in units of the scores; the same for all members.
  __device__ __forceinline__ void load_addend(TileSums& addend) const {
    const FlashsciBiasMask only_bias{
        p.bias_mask.bias, nullptr, p.bias_mask.bias_strides, {}, p.bias_mask.bias_is_fp32};
    set_zero(addend);
    apply_bias_mask<Op>(addend, BiasMaskView(only_bias, own.index[0], own.index[1], own.index[2]),
                        own_row, own_key, p.seq_q, p.seq_k, plan.bias_factor);
  }

  // --- a member

  // The initial values of S and dP - delta, for keys from n8 block `first` of the tile on. shown:
  // the mask of the first of them.
  __device__ __forceinline__ void start(StepTile& s, StepTile& dp, const Statistics& statistics,
                                        const TileSums& addend, int first,
                                        const uint8_t* shown) const {
#pragma unroll
    for (int n = 0; n < C::kN; ++n) {
      const uint32_t pair =
          key_mask ? *reinterpret_cast<const uint16_t*>(shown + n * 8 + lane % 4 * 2) : 0x101;
#pragma unroll
      for (int i = 0; i < C::kM * 4; ++i) {
        const float x = plan.bias_first ? addend[i / 4][first + n][i % 4] : 0.f;
        s[i / 4][n][i % 4] = (i % 2 == 0 ? pair & 0xff : pair >> 8) != 0 ? x : -INFINITY;
        dp[i / 4][n][i % 4] = statistics[i / 4][i % 4 / 2].y;
      }
    }
  }
  // Applies the parts of the bias and the masks that S could not start from.
  __device__ __forceinline__ void complete_scores(StepTile& s, StepTile& dp, const TileSums& addend,
                                                  int first, const BiasMember& member, int warp_row,
                                                  int warp_last_row, int key) const {
    if (!plan.bias_first) add_late(s, dp, addend, first, plan, p.bias_mask.capped != 0, p.scale);
    if (pair_mask) {
      const FlashsciBiasMask only_mask{nullptr, p.bias_mask.mask, {}, p.bias_mask.mask_strides, 0};
      apply_bias_mask<Op>(
          s, BiasMaskView(only_mask, member.index[0], member.index[1], member.index[2]),
          warp_row + lane / 4, key + lane % 4 * 2, p.seq_q, p.seq_k, 1.f);
    }
    if (window.begin(warp_last_row) > key || window.end(warp_row) < key + C::kStep)
      mask_scores(s, window, warp_row + opaque(lane) / 4, key + opaque(lane) % 4 * 2);
  }
  // sum += dS, for the keys from n8 block `first` of the tile on.
  __device__ __forceinline__ void add_ds(TileSums& sum, StepTile& s, const StepTile& dp,
                                         const Statistics& statistics, int first) const {
#pragma unroll
    for (int i = 0; i < C::kM * C::kN * 4; ++i) {
      const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
      s[m][n][e] = ptx::ex2_approx(fmaf(s[m][n][e], plan.scores.exp_scale, statistics[m][e / 2].x));
    }
    if (any_large(statistics)) limit_probabilities(s);
#pragma unroll
    for (int i = 0; i < C::kM * C::kN * 4; ++i) {
      const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
      sum[m][first + n][e] = fmaf(s[m][n][e], dp[m][n][e], sum[m][first + n][e]);
    }
  }
  __device__ __forceinline__ void add_member(TileSums& sum, const TileSums& addend,
                                             const BiasMember& member, int stage,
                                             uint32_t number) const {
    const int tile_row = member.index[3] * C::kBlockQ, tile_key = member.index[4] * C::kBlockK;
    const int warp_row = tile_row + warp * C::kRows;
    const int warp_last_row = min(warp_row + C::kRows, p.seq_q) - 1;
    const uint32_t left =
        stage * kStageQ + warp * C::kRows * T::kRowBytes + lane_by_rows<C::kHeadDim>();
#pragma unroll
    for (int step = 0; step < C::kBlockK; step += C::kStep) {
      const int key = tile_key + step;
      if (warp_row >= p.seq_q || key >= window.end(warp_last_row) ||
          key + C::kStep <= window.begin(warp_row))
        continue;
      uint32_t kept = 0;
      if constexpr (Drop::kDrops) {
        const uint32_t entry = member.index[0] * p.batch1 + member.index[1];
        kept = dropping.template draw_rows<C::kM, C::kN>(
            dropping.read_seed(), 0, entry * p.heads_q + member.index[2], warp_row + lane / 4, key);
      }
      StepTile s, dp;  // S, then P; dP - delta
      Statistics statistics;
#pragma unroll
      for (int i = 0; i < C::kM * 2; ++i)
        statistics[i / 2][i % 2] = shared.statistics[stage][warp * C::kRows + i * 8 + lane / 4];
      start(s, dp, statistics, addend, step / 8, &shared.shown[number % 2][step]);
      const uint32_t right = stage * kStageK + step * T::kRowBytes + lane_by_chunks<C::kHeadDim>();
      multiply_rows<Op, C::kHeadDim>(s, q_tile + left, k_tile + right);
      multiply_rows<Op, C::kHeadDim>(dp, dout_tile + left, v_tile + right);
      if constexpr (Drop::kDrops) drop_gradients(dp, statistics, kept);
      complete_scores(s, dp, addend, step / 8, member, warp_row, warp_last_row, key);
      add_ds(sum, s, dp, statistics, step / 8);
    }
  }

  // Writes to dbias, or to this split's partial sums; summed over the rows or keys of the tile
  // itself, if the bias has one row or key for all.
  __device__ __forceinline__ void write(TileSums& sum) const {
    const bool own_rows = p.dbias_strides.row != 0 || p.seq_q == 1;
    const bool own_keys = p.dbias_strides.column != 0 || p.seq_k == 1;
    const int64_t base = own.offset(p.dbias_strides, own.index[2]);
    if (!own_keys) add_keys(sum);
    if (own_rows) {
#pragma unroll
      for (int i = 0; i < C::kM * kN * 4; ++i) {
        const int m = i / (4 * kN), n = i / 4 % kN, e = i % 4;
        const int row = own_row + m * 16 + e / 2 * 8, key = own_keys ? own_key + n * 8 + e % 2 : 0;
        if (row >= p.seq_q || key >= p.seq_k) continue;
        if (!own_keys && (n > 0 || e % 2 > 0 || lane % 4 > 0)) continue;
        put_bias_sum<Op>(p, plan, bias, split,
                         base + row * p.dbias_strides.row + key * p.dbias_strides.column,
                         sum[m][n][e]);
      }
      return;
    }
    put_row_sums<Op, C>(sum, own, own_keys, split, warp, lane, p, plan, bias, base,
                        reinterpret_cast<float*>(&shared));
  }

  // Members [begin, end).
  __device__ __forceinline__ void run(uint32_t begin, uint32_t end) const {
    TileSums addend, sum;
    load_addend(addend);
    set_zero(sum);
    BiasMember next;
    next.decode(begin, bias.members);
#pragma unroll
    for (int i = 0; i < 5; ++i) next.index[i] += own.index[i];
    if (C::kStages == 2) {
      load(next, 0);
      ptx::cp_async_commit();
    }
    int shown = load_shown(next);
    int stage = 0;
#pragma unroll 1
    for (uint32_t number = begin; number < end; ++number) {
      const BiasMember member = next;
      if constexpr (C::kStages == 1) {
        __syncthreads();  // no warp still reads the previous member
        load(member, 0);
        ptx::cp_async_commit();
      }
      if (key_mask && threadIdx.x < C::kBlockK)
        shared.shown[number % 2][threadIdx.x] = static_cast<uint8_t>(shown);
      ptx::cp_async_wait<0>();
      __syncthreads();  // this stage is complete; no warp reads the other one
      if (number + 1 < end) {
        next.advance(bias.members);
        if (C::kStages == 2) load(next, stage ^ 1);
        shown = load_shown(next);
      }
      if (C::kStages == 2) ptx::cp_async_commit();
      add_member(sum, addend, member, stage, number);
      if (C::kStages == 2) stage ^= 1;
    }
    if constexpr (Drop::kDrops) {
#pragma unroll
      for (int i = 0; i < C::kM * kN * 4; ++i)
        sum[i / (4 * kN)][i / 4 % kN][i % 4] *= dropping.scale;
    }
    write(sum);
  }
};

template <class Op, class C, class... Drop>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    bias_gradient_kernel(const __grid_constant__ FlashsciBackwardParams p,
                         const __grid_constant__ BackwardPlan plan,
                         const __grid_constant__ BiasPlan bias, Drop... dropout) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<BiasShared<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));
  const uint32_t split = blockIdx.x % bias.splits;
  BiasMember own;
  own.decode(blockIdx.x / bias.splits, bias.own);
  const uint32_t begin = static_cast<uint64_t>(bias.member_count) * split / bias.splits;
  const uint32_t end = static_cast<uint64_t>(bias.member_count) * (split + 1) / bias.splits;
  using Dropped = Dropping<Drop...>;
  BiasGradient<Op, C, Dropped>{shared, p, plan, bias, own, split, Dropped(dropout...)}.run(begin,
                                                                                           end);
}

// dbias = the sum of the splits, in order.
template <class Op>
__global__ void __launch_bounds__(256, 6)
    bias_sum_kernel(const __grid_constant__ FlashsciBackwardParams p,
                    const __grid_constant__ BackwardPlan plan, uint32_t splits, int64_t elements) {
  sum_splits<Op>(p, plan, splits, elements);
}

}  // namespace flashsci::sm80::dbias
