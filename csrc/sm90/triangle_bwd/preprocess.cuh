// The kernel before the main kernel of the triangle backward, by two blocks of query rows: computes
// their statistics, and clears turns and the accumulators of dK and dV.
#pragma once
#include <cmath>
#include <cstdint>

#include "../../core/softmax.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"

namespace flashsci::sm90::triangle_bwd {

inline constexpr int kRowThreads = 256, kRowBlocks = 2, kRows = kRowBlocks * kBlock;

// The sum of products of eight pairs.
template <class Op>
__device__ __forceinline__ float dot8(const uint4& x, const uint4& y) {
  const uint32_t u[4] = {x.x, x.y, x.z, x.w}, v[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.f;
#pragma unroll
  for (int word = 0; word < 4; ++word)
    sum += Op::to_float(static_cast<uint16_t>(u[word])) *
               Op::to_float(static_cast<uint16_t>(v[word])) +
           Op::to_float(static_cast<uint16_t>(u[word] >> 16)) *
               Op::to_float(static_cast<uint16_t>(v[word] >> 16));
  return sum;
}

template <class Op>
__global__ void __launch_bounds__(kRowThreads)
    triangle_preprocess_kernel(const __grid_constant__ TriangleArgs a) {
  __shared__ float sums[kRows];  // per row: out times dout
  ptx::launch_dependents();
  const FlashsciBackwardParams& p = a.p;
  const uint32_t parts = a.q_blocks / kRowBlocks, heads = static_cast<uint32_t>(p.heads_q);
  const uint32_t batch_head = blockIdx.x / parts, part = blockIdx.x - batch_head * parts;
  const uint32_t batch = batch_head / heads, head = batch_head - batch * heads;
  const uint32_t batch0 = batch / static_cast<uint32_t>(p.batch1);
  const uint32_t batch1 = batch - batch0 * static_cast<uint32_t>(p.batch1);
  const int first_row = part * kRows, thread = threadIdx.x;
  const auto offset = [&](const FlashsciStrides& s) {
    return batch0 * s.batch0 + batch1 * s.batch1 + head * s.head;
  };
  // One thread per row loads its lse, before out and dout are loaded.
  const int own_row = first_row + thread;
  const bool row_exists = thread < kRows && own_row < p.seq_q;
  const float natural_lse = row_exists ? p.lse[int64_t{batch_head} * p.seq_q + own_row] : -INFINITY;
  const float dlse = row_exists && p.dlse != nullptr
                         ? p.dlse[offset(p.dlse_strides) + own_row * p.dlse_strides.row]
                         : 0.f;
  constexpr int kLanes = kHeadDim / 8, kStep = kRowThreads / kLanes;
  const int lane = thread % kLanes;
  const auto* out = static_cast<const uint16_t*>(p.out) + offset(p.out_strides) + lane * 8;
  const auto* dout = static_cast<const uint16_t*>(p.dout) + offset(p.dout_strides) + lane * 8;
  uint4 x[kRows / kStep], y[kRows / kStep];
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    const int row = first_row + i * kStep + thread / kLanes;
    x[i] = y[i] = make_uint4(0, 0, 0, 0);
    if (row < p.seq_q && lane * 8 < p.head_dim_v) {
      x[i] = *reinterpret_cast<const uint4*>(out + row * p.out_strides.row);
      y[i] = *reinterpret_cast<const uint4*>(dout + row * p.dout_strides.row);
    }
  }
  const int64_t at = int64_t{blockIdx.x} * kRowThreads + thread;
  const int64_t threads = int64_t{gridDim.x} * kRowThreads;
  for (int64_t i = at; i < a.cleared; i += threads)
    reinterpret_cast<float4*>(a.dk_sums)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  if (thread < kRowBlocks) a.turns[blockIdx.x * kRowBlocks + thread] = 0;
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    float sum = dot8<Op>(x[i], y[i]);
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) sums[i * kStep + thread / kLanes] = sum;
  }
  // lse in powers of two; finite for rows that see no key and for rows past the last.
  const bool sees_none = natural_lse == -INFINITY;
  const float lse = sees_none ? 3.4e38f : lse_of_backward(natural_lse);
  const bool large = __syncthreads_or(!sees_none && is_large(lse));
  if (thread >= kRows) return;
  Statistics& written = a.statistics[blockIdx.x * kRowBlocks + thread / kBlock];
  written.lse[thread % kBlock] = lse;
  written.delta[thread % kBlock] = sees_none ? 0.f : dlse - sums[thread];
  if (thread % kBlock == 0) written.large = large;
}

}  // namespace flashsci::sm90::triangle_bwd
