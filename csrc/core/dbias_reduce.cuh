// The gradient of a shared bias, without atomics: a sum over the dims that the bias lacks. This
// file says which CTA owns which tile of it, which members a tile sums, and how the sums reach
// memory.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../include/flashsci.h"
#include "softmax.cuh"

namespace flashsci {

// The tiles of dbias and the members that each of them sums, by dim: batch0, batch1, head, row
// tiles, key tiles. A dim counts in one of the two, and is 1 in the other.
struct BiasPlan {
  uint32_t own[5], members[5];
  uint32_t member_count, splits, shared;  // shared: the number of dims that the bias lacks
  int64_t elements;                       // of dbias

  static int64_t product(const uint32_t (&counts)[5]) {
    int64_t all = 1;
    for (uint32_t count : counts) all *= count;
    return all;
  }
  int64_t blocks() const { return splits * product(own); }
};

// The plan with tiles of block_q rows x block_k keys, except for the splits.
inline BiasPlan plan_bias_tiles(const FlashsciBackwardParams& p, int block_q, int block_k) {
  const int64_t sizes[5] = {p.batch0, p.batch1, p.heads_q, p.seq_q, p.seq_k};
  const int64_t strides[5] = {p.dbias_strides.batch0, p.dbias_strides.batch1, p.dbias_strides.head,
                              p.dbias_strides.row, p.dbias_strides.column};
  const int64_t blocks[5] = {1, 1, 1, block_q, block_k};
  BiasPlan plan{};
  plan.elements = 1;
  for (int i = 0; i < 5; ++i) {
    const int64_t count = (sizes[i] + blocks[i] - 1) / blocks[i];
    const bool own = strides[i] != 0 || sizes[i] == 1;
    if (own) plan.elements *= sizes[i];
    plan.own[i] = static_cast<uint32_t>(own ? count : 1);
    plan.members[i] = static_cast<uint32_t>(own ? 1 : count);
    plan.shared += !own;
  }
  const int64_t members = BiasPlan::product(plan.members);
  plan.member_count = static_cast<uint32_t>(std::min<int64_t>(members, UINT32_MAX));
  return plan;
}

// The number of splits that keeps any large device busy.
inline uint32_t splits_for_any_device(const BiasPlan& plan) {
  constexpr int64_t kEnough = 1024;  // CTAs: a few for each SM of a large device
  const int64_t owners = BiasPlan::product(plan.own);
  return static_cast<uint32_t>(std::clamp<int64_t>(owners > 0 ? kEnough / owners : 1, 1,
                                                   std::max<int64_t>(plan.member_count, 1)));
}

// Indices of a member in own and member dims, and the offsets of its tensors.
struct BiasMember {
  uint32_t index[5];

  __device__ __forceinline__ void decode(uint32_t number, const uint32_t (&sizes)[5]) {
#pragma unroll
    for (int i = 4; i > 0; --i) {
      const uint32_t rest = number / sizes[i];
      index[i] = number - rest * sizes[i];
      number = rest;
    }
    index[0] = number;
  }
  // Moves to the next member; dims with one member do not change.
  __device__ __forceinline__ void advance(const uint32_t (&sizes)[5]) {
#pragma unroll
    for (int i = 4; i >= 0; --i) {
      if (sizes[i] == 1) continue;
      if (++index[i] < sizes[i]) return;
      index[i] = 0;
    }
  }
  template <class Strides>
  __device__ __forceinline__ int64_t offset(const Strides& s, uint32_t head) const {
    return index[0] * s.batch0 + index[1] * s.batch1 + head * s.head;
  }
};

// Writes one value of dbias, or of this split's partial sums.
template <class Op, class Plan>
__device__ __forceinline__ void put_bias_sum(const FlashsciBackwardParams& p, const Plan& plan,
                                             const BiasPlan& bias, uint32_t split, int64_t at,
                                             float x) {
  if (bias.splits > 1)
    plan.bias_sums[split * bias.elements + at] = x;
  else if (p.bias_mask.bias_is_fp32)
    static_cast<float*>(p.dbias)[at] = x;
  else
    static_cast<uint16_t*>(p.dbias)[at] = static_cast<uint16_t>(Op::pack2(x, x));
}

// For a bias without keys: adds up the sums [m16, n8, fragment] of each row over a quad, into the
// first element.
template <int kM, int kN>
__device__ __forceinline__ void add_keys(float (&sum)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * 2; ++i) {
    float x = 0.f;
#pragma unroll
    for (int n = 0; n < kN; ++n) x += sum[i / 2][n][i % 2 * 2] + sum[i / 2][n][i % 2 * 2 + 1];
    sum[i / 2][0][i % 2 * 2] = quad_sum(x);
  }
}

// For a bias without rows: the sums over all rows of a tile go to dbias at `base`, through
// warp_sums [kWarps, kBlockK] in shared memory.
template <class Op, class C, class Plan, int kN>
__device__ __forceinline__ void put_row_sums(const float (&sum)[C::kM][kN][4],
                                             const BiasMember& own, bool own_keys, uint32_t split,
                                             int warp, int lane, const FlashsciBackwardParams& p,
                                             const Plan& plan, const BiasPlan& bias, int64_t base,
                                             float* warp_sums) {
  __syncthreads();  // no warp still reads the old contents
#pragma unroll
  for (int i = 0; i < kN * 2; ++i) {
    float x = 0.f;
#pragma unroll
    for (int j = 0; j < C::kM * 2; ++j) x += sum[j / 2][i / 2][j % 2 * 2 + i % 2];
    x += __shfl_xor_sync(0xffffffffu, x, 4);
    x += __shfl_xor_sync(0xffffffffu, x, 8);
    x += __shfl_xor_sync(0xffffffffu, x, 16);
    if (lane < 4) warp_sums[warp * C::kBlockK + i / 2 * 8 + lane * 2 + i % 2] = x;
  }
  __syncthreads();
  const int column = threadIdx.x, at_key = own.index[4] * C::kBlockK + column;
  if (column < (own_keys ? C::kBlockK : 1) && at_key < p.seq_k) {
    float x = 0.f;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) x += warp_sums[w * C::kBlockK + column];
    put_bias_sum<Op>(p, plan, bias, split, base + at_key * p.dbias_strides.column, x);
  }
}

// dbias = the sum of the splits, in order; blocks of 256 threads.
template <class Op, class Plan>
__device__ __forceinline__ void sum_splits(const FlashsciBackwardParams& p, const Plan& plan,
                                           uint32_t splits, int64_t elements) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < elements;
       i += int64_t{256} * gridDim.x) {
    float x = 0.f;
    for (uint32_t split = 0; split < splits; ++split) x += plan.bias_sums[split * elements + i];
    if (p.bias_mask.bias_is_fp32)
      static_cast<float*>(p.dbias)[i] = x;
    else
      static_cast<uint16_t*>(p.dbias)[i] = static_cast<uint16_t>(Op::pack2(x, x));
  }
}

}  // namespace flashsci
