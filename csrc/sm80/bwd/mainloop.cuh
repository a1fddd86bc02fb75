// The state of a warp of a CTA that owns keys in the loop over query tiles, and the steps that
// PlainWarp (kernel.cuh) and BiasMaskWarp (bias_mask_kernel.cuh) share.
//
// Those two know the places of tensors, load tiles, make the scores, and have the loop. This file
// has all else: the queries that see keys, exponentials, and the products of P and dS.
#pragma once
#include <cstddef>

#include "../../core/row_statistics.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/shared.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "warp_mma.cuh"

namespace flashsci::sm80::bwd {

// A warp, by its coordinates in the CTA: group warp_k of keys, warp_q inside it, with a role and a
// part of the columns (see kernel.cuh).
template <class Op, class C>
struct KeyTileWarp {
  using T = Tile<C::kHeadDim>;
  using TS = Tile<C::kBlockQ>;  // P^T and dS^T
  using Shared = BackwardShared<C>;
  using Scores = float[C::kM][C::kN][4];
  using Operand = uint32_t[C::kN / 2][C::kM][4];
  // dV and dK, or one of them: [m16, n8, fragment]
  using Sums = float[C::kSums][C::kM][2 * C::kChunkPairs][4];
  using Dq = float[C::kDqM][2 * C::kDqPairs][4];
  using DimSpan = Span<C::kHeadDim, C::kChunkPairs>;  // the columns of this warp's sums
  static constexpr int kStageBytes = C::kBlockQ * T::kRowBytes;
  static constexpr int kFromK = offsetof(Shared, v) - offsetof(Shared, k);      // from K to V
  static constexpr int kFromQ = offsetof(Shared, dout) - offsetof(Shared, q);   // from Q to dO
  static constexpr int kFromDs = (C::kRoles - 1) * C::kBlockK * TS::kRowBytes;  // from dS^T to P^T

  const FlashsciBackwardParams& p;
  const BackwardPlan& plan;
  const int warp, lane;
  const int warp_k = warp / C::kWarpsQ, warp_q = warp % C::kWarpsQ;
  const int role = C::kRoles == 2 ? warp_q % 2 : 0, dim_part = warp_q / C::kRoles;
  const int dq_warp_q = warp / C::kDqWarpsD, dq_warp_d = warp % C::kDqWarpsD;
  const Window window;
  const int queries, keys;  // of the sequence
  const int warp_key;       // first key of this warp
  const uint32_t k_tile, q_tile, ds_tile, statistics_tile;
  // The place of this lane's fragments of P^T and dS^T: key lane / 4, query lane % 4 * 2.
  const uint32_t products_out;
  // By reference: arrays that loops index would keep the whole object in memory until the loops are
  // unrolled, too late for most of the optimiser.
  Sums& sums;

  __device__ __forceinline__ KeyTileWarp(const FlashsciBackwardParams& p_,
                                         const BackwardPlan& plan_, const Shared& shared, int warp_,
                                         int lane_, const Window& window_, int queries_,
                                         int tile_key, Sums& sums_)
      : p(p_),
        plan(plan_),
        warp(warp_),
        lane(lane_),
        window(window_),
        queries(queries_),
        keys(window_.seq_k),
        warp_key(tile_key + warp_k * C::kKeys),
        k_tile(ptx::shared_address(shared.k)),
        q_tile(k_tile + offsetof(Shared, q)),
        ds_tile(k_tile + offsetof(Shared, products)),
        statistics_tile(k_tile + offsetof(Shared, statistics)),
        products_out(ds_tile + warp_k * C::kKeys * TS::kRowBytes + TS::offset(lane / 4, 0) +
                     lane % 4 * 4),
        sums(sums_) {
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) set_zero(sums[i]);
  }

  // Queries [step, step + kStep) of the tile belong to this warp, one step after the other.
  __device__ __forceinline__ int first_step() const { return warp_q * C::kQueries; }
  __device__ __forceinline__ int end_step() const { return (warp_q + 1) * C::kQueries; }

  // Whether some of the kStep queries from `query` on see some of this warp's keys.
  __device__ __forceinline__ bool any_seen(int query) const {
    const int last_query = min(query + C::kStep, queries) - 1;
    const int last_key = min(warp_key + C::kKeys, keys) - 1;
    return query < queries && window.begin(query) <= last_key && window.end(last_query) > warp_key;
  }
  // Whether all of them see all of its keys.
  __device__ __forceinline__ bool all_seen(int query) const {
    const int last_query = min(query + C::kStep, queries) - 1;
    return window.begin(last_query) <= warp_key && window.end(query) >= warp_key + C::kKeys;
  }

  // Row `row` of the sequence and those after it, one a thread; source: of the first.
  __device__ __forceinline__ void load_statistics_tile(int thread, int stage, int row,
                                                       const float2* source) const {
    if (thread >= C::kBlockQ) return;
    const uint32_t target = statistics_tile + (stage * C::kBlockQ + thread) * 8;
    if (row + thread < queries)
      ptx::cp_async_small<8>(target, source + thread, 8);
    else  // no probability, for any scores of rows past the last
      ptx::st_shared(target, make_uint2(__float_as_uint(-INFINITY), 0));
  }

  // The address of the statistics of this lane's columns.
  __device__ __forceinline__ uint32_t statistics_of(int stage, int step) const {
    return statistics_tile + (stage * C::kBlockQ + step) * 8 + lane % 4 * 16;
  }
  // dP starts from -delta.
  __device__ __forceinline__ void start_dp(Scores& dp, uint32_t statistics) const {
#pragma unroll
    for (int n = 0; n < C::kN; ++n) {
      const float4 x = load_statistics(statistics + n * 64);
#pragma unroll
      for (int m = 0; m < C::kM; ++m) {
        dp[m][n][0] = dp[m][n][2] = x.y;
        dp[m][n][1] = dp[m][n][3] = x.w;
      }
    }
  }
  // S^T becomes P^T.
  __device__ __forceinline__ void exponentiate(Scores& s, uint32_t statistics) const {
#pragma unroll
    for (int n = 0; n < C::kN; ++n) {
      const float4 x = load_statistics(statistics + n * 64);
#pragma unroll
      for (int m = 0; m < C::kM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[m][n][e] =
              ptx::ex2_approx(fmaf(s[m][n][e], plan.scores.exp_scale, e % 2 == 0 ? x.x : x.z));
      }
    }
    if (any_large_column<C::kN>(statistics)) limit_probabilities(s);
  }

  __device__ __forceinline__ static void clear(Operand& a) {
#pragma unroll
    for (int i = 0; i < C::kN / 2 * C::kM * 4; ++i) a[i / (4 * C::kM)][i / 4 % C::kM][i % 4] = 0;
  }
  // Stores dS^T for dQ, and the operands of partner warps.
  __device__ __forceinline__ void share_products(const Operand& p16, const Operand& ds16,
                                                 int step) const {
#pragma unroll
    for (int i = 0; i < C::kN / 2 * C::kM * 4; ++i) {
      const int k = i / (4 * C::kM), m = i / 4 % C::kM, part = i % 4;
      const uint32_t target = ((products_out ^ (step * 2)) ^ ((2 * k + part / 2) * kChunkBytes)) +
                              (m * 16 + part % 2 * 8) * TS::kRowBytes;
      ptx::st_shared(target, ds16[k][m][part]);
      if (C::kRoles == 2 && (C::kDimSplit > 1 || role == 1))
        ptx::st_shared(target + kFromDs, p16[k][m][part]);
    }
  }

  // The rows of dO (for dV) or Q (for dK) from `query` of the tile on, as right operand.
  __device__ __forceinline__ DimSpan streamed_rows(uint32_t q_stage, int query) const {
    return DimSpan(q_stage + (C::kRoles == 2 && role == 0 ? kFromQ : 0) + query * T::kRowBytes +
                       lane_by_rows<C::kHeadDim>(lane),
                   dim_part);
  }
  // dV and dK of the queries of a step.
  __device__ __forceinline__ void add_own(const Operand& p16, const Operand& ds16, uint32_t q_stage,
                                          int step) {
    const DimSpan right = streamed_rows(q_stage, step);
    if constexpr (C::kRoles == 1) {
#pragma unroll
      for (int k = 0; k < C::kN / 2; ++k)
        multiply_16<Op>(sums[0], p16[k], right, kFromQ + k * 16 * T::kRowBytes);
#pragma unroll
      for (int k = 0; k < C::kN / 2; ++k)
        multiply_16<Op>(sums[C::kSums - 1], ds16[k], right, k * 16 * T::kRowBytes);
    } else {
#pragma unroll
      for (int k = 0; k < C::kN / 2; ++k) {
        uint32_t a[C::kM][4];
#pragma unroll
        for (int i = 0; i < C::kM * 4; ++i)
          a[i / 4][i % 4] = role == 0 ? p16[k][i / 4][i % 4] : ds16[k][i / 4][i % 4];
        multiply_16<Op>(sums[0], a, right, k * 16 * T::kRowBytes);
      }
    }
  }
  // dV or dK of the queries of other warps of the group.
  __device__ __forceinline__ void add_partners(uint32_t q_stage) {
    if constexpr (C::kRoles == 2) {
      const uint32_t left = ds_tile + (role == 0 ? kFromDs : 0) +
                            warp_k * C::kKeys * TS::kRowBytes + lane_by_rows<C::kBlockQ>(lane);
#pragma unroll 1
      for (int other = 1; other < C::kWarpsQ; ++other) {
        const int from = (warp_q ^ other) * C::kQueries;
        const DimSpan right = streamed_rows(q_stage, from);
#pragma unroll
        for (int k = 0; k < C::kQueries / 16; ++k) {
          uint32_t a[C::kM][4];
#pragma unroll
          for (int m = 0; m < C::kM; ++m)
            ptx::ldmatrix_x4(a[m], (left ^ (from * 2 + k * 32)) + m * 16 * TS::kRowBytes);
          multiply_16<Op>(sums[0], a, right, k * 16 * T::kRowBytes);
        }
      }
    }
  }

  // dQ of the query tile from all keys of the CTA; lane_: this lane, opaque or not.
  __device__ __forceinline__ void multiply_dq(Dq& dq, int lane_) const {
    set_zero(dq);
    const uint32_t left = ds_tile + lane_by_chunks<C::kBlockQ>(lane_);
    const Span<C::kHeadDim, C::kDqPairs> right(k_tile + lane_by_rows<C::kHeadDim>(lane_),
                                               dq_warp_d);
#pragma unroll
    for (int k = 0; k < C::kBlockK / 16; ++k) {
      uint32_t a[C::kDqM][4];  // dS [16 kDqM queries, 16 keys]
#pragma unroll
      for (int m = 0; m < C::kDqM; ++m)
        ptx::ldmatrix_x4_trans(a[m],
                               (left ^ ((dq_warp_q * C::kDqM + m) * 32)) + k * 16 * TS::kRowBytes);
      multiply_16<Op>(dq, a, right, k * 16 * T::kRowBytes);
    }
  }
  // First of the queries whose dQ this warp has.
  __device__ __forceinline__ int dq_row(int query_tile) const {
    return query_tile * C::kBlockQ + dq_warp_q * C::kDqM * 16;
  }
  __device__ __forceinline__ void write_dq(const Dq& dq, uint16_t* target, int row) const {
    store_rows_direct<Op>(dq, p.scale, target, p.dq_strides.row, queries - row,
                          dq_warp_d * C::kDqPairs * 16, p.head_dim, plan.vector_dq);
  }
  // tile_sums: of the query tile.
  __device__ __forceinline__ void add_dq(const Dq& dq, float* tile_sums, int lane_) const {
    float* target = tile_sums + warp * C::kDqValues * 32 + lane_;
#pragma unroll
    for (int i = 0; i < C::kDqValues; ++i)
      ptx::red_add(target + i * 32, dq[i / (8 * C::kDqPairs)][i / 4 % (2 * C::kDqPairs)][i % 4]);
  }

  // The gradients that this warp has.
  __device__ __forceinline__ bool has_dv() const {
    return p.dv != nullptr && (C::kRoles == 1 || role == 0);
  }
  __device__ __forceinline__ bool has_dk() const {
    return p.dk != nullptr && (C::kRoles == 1 || role == 1);
  }
  // Stores this warp's rows of a gradient, through the tile that K or V had. kDealt: keys are in
  // the rows of the tile that row_of_key gives.
  template <bool kDealt>
  __device__ __forceinline__ void store_dv(uint16_t* dv) const {
    store_gradient<Op, C::kHeadDim, kDealt>(sums[0], 1.f,
                                            k_tile + kFromK + warp_k * C::kKeys * T::kRowBytes,
                                            dim_part * C::kChunkPairs * 2, dv, p.dv_strides.row,
                                            keys - warp_key, p.head_dim_v, plan.vector_dv);
  }
  template <bool kDealt>
  __device__ __forceinline__ void store_dk(uint16_t* dk) const {
    store_gradient<Op, C::kHeadDim, kDealt>(sums[C::kSums - 1], p.scale,
                                            k_tile + warp_k * C::kKeys * T::kRowBytes,
                                            dim_part * C::kChunkPairs * 2, dk, p.dk_strides.row,
                                            keys - warp_key, p.head_dim, plan.vector_dk);
  }
};

}  // namespace flashsci::sm80::bwd
