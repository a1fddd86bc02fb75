// Decoding, second kernel: the partial results of a sequence's segments become its output.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../core/softmax.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"

namespace flashsci::sm90::decode {

// One warp for each row of each sequence that has several segments.
template <class Op, int kHeadDim>
__global__ void __launch_bounds__(128, 8) decode_combine(const __grid_constant__ DecodeArgs a) {
  ptx::wait_for_prerequisites();
  const DecodePlan& plan = a.plan;
  const int index = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int sequence = index / plan.rows, row = index - sequence * plan.rows;
  if (sequence >= plan.sequences) return;
  const int begin = sequence * plan.blocks, last = begin + plan.blocks - 1;
  const int segments = last / plan.run - begin / plan.run + 1;
  if (segments == 1) return;
  const int64_t first = int64_t{sequence} * plan.segments * plan.rows + row;
  float maximum = -INFINITY;
  for (int i = 0; i < segments; ++i)
    maximum = fmaxf(maximum, plan.partial_lse[first + i * plan.rows]);
  const float reference = maximum == -INFINITY ? 0.f : maximum;
  constexpr int kColumnPairs = kHeadDim / 64;  // of columns, of a lane
  float2 sum[kColumnPairs] = {};
  float weights = 0.f;
  for (int i = 0; i < segments; ++i) {
    const int64_t at = first + i * plan.rows;
    const float weight = ptx::ex2_approx(plan.partial_lse[at] - reference);
    weights += weight;
#pragma unroll
    for (int n = 0; n < kColumnPairs; ++n) {
      const float2 part =
          *reinterpret_cast<const float2*>(plan.partial_out + at * kHeadDim + n * 64 + lane * 2);
      sum[n].x = fmaf(weight, part.x, sum[n].x);
      sum[n].y = fmaf(weight, part.y, sum[n].y);
    }
  }
  const float inverse = weights == 0.f ? 0.f : 1.f / weights;
  const DecodeRow place(a, sequence, row);
  auto* out = static_cast<uint16_t*>(a.p.out) + place.offset(a.p.out_strides);
#pragma unroll
  for (int n = 0; n < kColumnPairs; ++n)
    if (n * 64 + lane * 2 < a.p.head_dim_v)
      *reinterpret_cast<uint32_t*>(out + n * 64 + lane * 2) =
          Op::pack2(sum[n].x * inverse, sum[n].y * inverse);
  if (lane == 0)
    a.p.lse[place.lse_offset(a.p)] =
        weights == 0.f ? -INFINITY : (reference + ptx::lg2_approx(weights)) * kLn2;
}

}  // namespace flashsci::sm90::decode
