// The kernel after the main kernel of the triangle backward: dQ from its fp32 accumulator, dK and
// dV if they have one, and dbias from the sums of the groups.
#pragma once
#include <cstdint>

#include "../../ptx/warpgroup.cuh"
#include "config.cuh"
#include "preprocess.cuh"

namespace flashsci::sm90::triangle_bwd {

// Two blocks of rows, the pair-th of all heads, from accumulators in register order.
template <class Op>
__device__ __forceinline__ void store_rows(const TriangleArgs& a, const float* sums, uint32_t pair,
                                           uint32_t blocks, void* base, const FlashsciStrides& s,
                                           float scale, int rows_of_head, int columns) {
  constexpr int kPitch = kHeadDim + 8;  // elements: rows fall into different banks
  __shared__ __align__(16) uint16_t rows[kRowBlocks][kBlock * kPitch];
  const uint32_t which = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
  const uint32_t item = pair * kRowBlocks + which;
  const uint32_t batch_head = item / blocks, block = item - batch_head * blocks;
  if (batch_head < a.heads) {
    const auto* from = reinterpret_cast<const float4*>(sums + int64_t{item} * kSumFloats) + thread;
    float4 x[kHeadDim / 8];
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j)
      x[j] = j * 8 < columns ? from[j * 128] : make_float4(0.f, 0.f, 0.f, 0.f);
    const int at = (thread / 32 * 16 + lane / 4) * kPitch + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      auto* words = reinterpret_cast<uint32_t*>(rows[which] + at + j * 8);
      words[0] = Op::pack2(x[j].x * scale, x[j].y * scale);
      words[8 * kPitch / 2] = Op::pack2(x[j].z * scale, x[j].w * scale);
    }
  }
  __syncthreads();
  if (batch_head >= a.heads) return;
  const uint32_t heads = static_cast<uint32_t>(a.p.heads_q), batch = batch_head / heads;
  const uint32_t batch1 = static_cast<uint32_t>(a.p.batch1);
  auto* target = static_cast<uint16_t*>(base) + batch / batch1 * s.batch0 +
                 batch % batch1 * s.batch1 + (batch_head - batch * heads) * s.head;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = i * 32 + thread / 4, column = thread % 4 * 8, at = block * kBlock + row;
    if (at < rows_of_head && column < columns)
      *reinterpret_cast<uint4*>(target + at * s.row + column) =
          *reinterpret_cast<const uint4*>(rows[which] + row * kPitch + column);
  }
}

// dbias = the sum over the groups that had members of the owner, in order.
template <class Op>
__device__ __forceinline__ void sum_dbias(const TriangleArgs& a, int64_t at) {
  const FlashsciBackwardParams& p = a.p;
  const int64_t pairs_of_scores = int64_t{p.seq_q} * p.seq_k;
  if (at >= a.owners * pairs_of_scores) return;
  const uint32_t owner = static_cast<uint32_t>(at / pairs_of_scores);
  const uint32_t inside = static_cast<uint32_t>(at - owner * pairs_of_scores);
  const uint64_t pairs = uint64_t{a.owners} * a.members, first = uint64_t{owner} * a.members;
  const uint32_t end = group_of(first + a.members - 1, pairs, a.groups);
  float sum = 0.f;
#pragma unroll 8
  for (uint32_t group = group_of(first, pairs, a.groups); group <= end; ++group)
    sum += a.dbias_sums[int64_t{group + owner} * pairs_of_scores + inside];
  const uint32_t query = inside / static_cast<uint32_t>(p.seq_k);
  const uint32_t key = inside - query * static_cast<uint32_t>(p.seq_k);
  const FlashsciScoreStrides& s = p.dbias_strides;
  const int64_t target = Place(a, owner, 0).offset(s) + query * s.row + key * s.column;
  if (p.bias_mask.bias_is_fp32)
    static_cast<float*>(p.dbias)[target] = sum;
  else
    static_cast<uint16_t*>(p.dbias)[target] = static_cast<uint16_t>(Op::pack2(sum, sum));
}

// Number of pairs of blocks of rows in all heads.
__host__ __device__ inline uint32_t row_pairs(uint32_t heads, uint32_t blocks) {
  return (heads * blocks + kRowBlocks - 1) / kRowBlocks;
}

template <class Op>
__global__ void __launch_bounds__(kRowThreads)
    triangle_postprocess_kernel(const __grid_constant__ TriangleArgs a) {
  ptx::wait_for_prerequisites();
  const FlashsciBackwardParams& p = a.p;
  uint32_t item = blockIdx.x;
  const uint32_t q_pairs = row_pairs(a.heads, a.q_blocks);
  if (item < q_pairs) {
    store_rows<Op>(a, a.dq_sums, item, a.q_blocks, p.dq, p.dq_strides, p.scale, p.seq_q,
                   p.head_dim);
    return;
  }
  item -= q_pairs;
  if (a.panels > 1) {
    const uint32_t k_pairs = row_pairs(a.heads, a.k_blocks);
    if (item < 2 * k_pairs) {
      const bool of_v = item >= k_pairs;
      store_rows<Op>(a, of_v ? a.dv_sums : a.dk_sums, of_v ? item - k_pairs : item, a.k_blocks,
                     of_v ? p.dv : p.dk, of_v ? p.dv_strides : p.dk_strides, of_v ? 1.f : p.scale,
                     p.seq_k, of_v ? p.head_dim_v : p.head_dim);
      return;
    }
    item -= 2 * k_pairs;
  }
  sum_dbias<Op>(a, int64_t{item} * kRowThreads + threadIdx.x);
}

}  // namespace flashsci::sm90::triangle_bwd
