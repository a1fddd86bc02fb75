// The first kernel of the fp32 backward: the statistics of the queries for its other kernels.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../../core/coord.cuh"
#include "../../core/softmax.cuh"
#include "../../include/flashsci.h"

namespace flashsci::sm80::bwd_fp32 {

// lse in log2 units (+inf for a row without keys: P is then 0) and delta of every query.
__global__ void __launch_bounds__(256, 4)
    statistics_fp32_kernel(const __grid_constant__ FlashsciBackwardParams p, float2* statistics,
                           uint32_t tiles, int lanes, int vector) {
  const HeadCoord place(blockIdx.x, tiles, p.heads_q, p.batch1);
  const uint32_t tile = blockIdx.x - place.batch_head * tiles;
  const int64_t row = static_cast<int64_t>(tile) * (256 / lanes) + threadIdx.x / lanes;
  float sum = 0.f;
  if (row < p.seq_q && p.dout != nullptr) {
    const float* dout = static_cast<const float*>(p.dout) +
                        place.offset(p.dout_strides, place.head) + row * p.dout_strides.row;
    const float* out = static_cast<const float*>(p.out) + place.offset(p.out_strides, place.head) +
                       row * p.out_strides.row;
    if (vector) {
      for (int d = threadIdx.x % lanes * 4; d < p.head_dim_v; d += lanes * 4) {
        const float4 a = __ldg(reinterpret_cast<const float4*>(dout + d));
        const float4 b = __ldg(reinterpret_cast<const float4*>(out + d));
        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
      }
    } else {
      for (int d = threadIdx.x % lanes; d < p.head_dim_v; d += lanes)
        sum = fmaf(__ldg(dout + d), __ldg(out + d), sum);
    }
  }
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (row >= p.seq_q || threadIdx.x % lanes != 0) return;
  const int64_t at = static_cast<int64_t>(place.batch_head) * p.seq_q + row;
  if (p.dlse != nullptr)
    sum -= p.dlse[place.offset(p.dlse_strides, place.head) + row * p.dlse_strides.row];
  const float lse = p.lse[at];
  statistics[at] =
      lse == -INFINITY ? make_float2(INFINITY, 0.f) : make_float2(lse_of_backward(lse), sum);
}

}  // namespace flashsci::sm80::bwd_fp32
