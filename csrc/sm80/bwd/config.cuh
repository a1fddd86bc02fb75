// The common part of the backward kernels: values that the host derives from the parameters, the
// workspace, and the tiles of the kernels that own keys.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../core/coord.cuh"
#include "../../core/mask.cuh"
#include "../../core/score_mod.cuh"
#include "../../core/smem_tile.cuh"
#include "../../core/tile_rows.cuh"
#include "../../core/varlen.cuh"
#include "../../include/flashsci.h"

namespace flashsci::sm80::bwd {

static_assert(std::is_trivially_copyable_v<FlashsciBackwardParams>, "passed to kernels by value");

struct BackwardPlan {
  // Workspace. statistics: [B0, B1, Hq, Sq] of (-lse in log2 units, -delta); (-inf, 0) for a row
  // that sees no key. dq_sums: a tile of fp32 sums in fragment order for each slot of each query
  // head.
  float2* statistics;
  float* dq_sums;
  float* bias_sums;      // [splits, elements of dbias], when the members are split
  int group;             // query heads of a key head
  uint32_t query_slots;  // query tiles of one query head in dq_sums
  ScorePlan scores;
  float bias_factor;  // from natural units to those of s; kScaled only
  int bias_first;     // there is a bias, and scores can start from it
  int vector;         // q, k, v, dout rows take 16-byte copies
  int vector_dq, vector_dk, vector_dv;
  int bias_vector, mask_vector, dbias_vector;  // rows of four keys are aligned and whole
  int adds_dq;                                 // backward_kernel adds dq to dq_sums
  int writes_dq;    // backward_kernel writes dq: all keys are in its tile
  int writes_bias;  // backward_kernel writes dbias: it has an element for every pair
  int ragged;       // 1: the bias has blocks of pairs (core/ragged_bias.cuh)
};

template <int kHeadDim_, int kBlockK_, int kBlockQ_, int kWarpsK_, int kWarpsQ_, int kStages_,
          int kMinBlocks_, int kStep_ = 32>
struct BackwardTiling {
  static constexpr int kHeadDim = kHeadDim_, kBlockK = kBlockK_, kBlockQ = kBlockQ_;
  static constexpr int kWarpsK = kWarpsK_, kWarpsQ = kWarpsQ_;
  static constexpr int kStages = kStages_, kMinBlocks = kMinBlocks_;
  static constexpr int kWarps = kWarpsK * kWarpsQ, kThreads = 32 * kWarps;
  static constexpr int kKeys = kBlockK / kWarpsK;                      // keys of a warp
  static constexpr int kQueries = kBlockQ / kWarpsQ;                   // queries of a warp
  static constexpr int kStep = kQueries < kStep_ ? kQueries : kStep_;  // queries per step
  static constexpr int kM = kKeys / 16, kN = kStep / 8;
  // Accumulators of a warp: dV and dK (one role), or one of them; all columns or half.
  static constexpr int kRoles = kWarpsQ == 1 ? 1 : 2, kSums = kWarpsQ == 1 ? 2 : 1;
  static constexpr int kDimSplit = kWarpsQ / kRoles;
  static constexpr int kChunkPairs = kHeadDim / 16 / kDimSplit;  // chunk pairs of an accumulator
  // dQ: warps over queries x columns, 32 queries a warp if that leaves whole pairs of chunks.
  static constexpr int kDqWide = kBlockQ / 32, kDqWideColumns = kHeadDim * kDqWide / kWarps;
  static constexpr int kDqWarpsQ = kDqWideColumns % 16 == 0 ? kDqWide : 2 * kDqWide;
  static constexpr int kDqWarpsD = kWarps / kDqWarpsQ;
  static constexpr int kDqM = kBlockQ / kDqWarpsQ / 16;
  static constexpr int kDqPairs = kHeadDim / kDqWarpsD / 16;
  static constexpr int kDqValues = kDqM * kDqPairs * 2 * 4;  // per lane
  static_assert(kKeys % 16 == 0 && kStep % 16 == 0 && kBlockQ <= 64, "whole mma and swizzle tiles");
  static_assert(kDqM * kDqPairs * kWarps * 256 == kBlockQ * kHeadDim, "dQ is split evenly");
};

template <class C>
struct alignas(128) BackwardShared {
  uint16_t k[C::kBlockK * C::kHeadDim];                   // [kBlockK, kHeadDim], later dK
  uint16_t v[C::kBlockK * C::kHeadDim];                   // [kBlockK, kHeadDim], later dV
  uint16_t q[C::kStages][C::kBlockQ * C::kHeadDim];       // [stage, kBlockQ, kHeadDim]
  uint16_t dout[C::kStages][C::kBlockQ * C::kHeadDim];    // [stage, kBlockQ, kHeadDim]
  uint16_t products[C::kRoles][C::kBlockK * C::kBlockQ];  // dS^T, and P^T for partners
  float2 statistics[C::kStages][C::kBlockQ];              // [stage, kBlockQ]: -lse, -delta
};

// dP - delta becomes dS.
template <int kM, int kN>
__device__ __forceinline__ void multiply_elements(float (&dp)[kM][kN][4],
                                                  const float (&prob)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i)
    dp[i / (4 * kN)][i / 4 % kN][i % 4] *= prob[i / (4 * kN)][i / 4 % kN][i % 4];
}

}  // namespace flashsci::sm80::bwd
