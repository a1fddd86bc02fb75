// The statistics of each query that the backward needs besides q and dout.
//
// statistics_i = (-lse_of_backward(lse_i), -delta_i), delta_i = sum_d dout_id out_id - dlse_i;
// (-inf, 0) where a row sees no key. A row is read by kRowLanes lanes, 16 bytes each at a time.
#pragma once
#include <cuda_runtime.h>

#include "../../core/coord.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/warpgroup.cuh"
#include "calls.cuh"

namespace flashsci::sm90::pair {

// A head has `rows` entries, a multiple of kRowsOfBlock.
__global__ void __launch_bounds__(kRowThreads)
    statistics_kernel(const __grid_constant__ FlashsciBackwardParams p, float2* statistics,
                      int64_t rows, uint32_t tiles) {
  ptx::launch_dependents();
  const HeadCoord place(blockIdx.x, tiles, p.heads_q, p.batch1);
  const int64_t row =
      int64_t{blockIdx.x - place.batch_head * tiles} * kRowsOfBlock + threadIdx.x / kRowLanes;
  float sum = 0.f;
  if (row < p.seq_q) {
    const auto* dout = static_cast<const float*>(p.dout) +
                       place.offset(p.dout_strides, place.head) + row * p.dout_strides.row;
    const auto* out = static_cast<const float*>(p.out) + place.offset(p.out_strides, place.head) +
                      row * p.out_strides.row;
    for (int d = threadIdx.x % kRowLanes * 4; d < p.head_dim_v; d += kRowLanes * 4) {
      const float4 x = __ldg(reinterpret_cast<const float4*>(dout + d));
      const float4 y = __ldg(reinterpret_cast<const float4*>(out + d));
      sum = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sum))));
    }
  }
  sum = quad_sum(sum);
  if (threadIdx.x % kRowLanes != 0) return;
  float2& target = statistics[int64_t{place.batch_head} * rows + row];
  if (row >= p.seq_q) {
    target = make_float2(0.f, 0.f);  // padding: P is finite, and rows of zeros add nothing
    return;
  }
  const int64_t at = int64_t{place.batch_head} * p.seq_q + row;
  if (p.dlse != nullptr)
    sum -= p.dlse[place.offset(p.dlse_strides, place.head) + row * p.dlse_strides.row];
  const float lse = p.lse[at];
  target =
      lse == -INFINITY ? make_float2(-INFINITY, 0.f) : make_float2(-lse_of_backward(lse), -sum);
}

}  // namespace flashsci::sm90::pair
