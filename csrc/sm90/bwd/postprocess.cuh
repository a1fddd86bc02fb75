// The kernel after the main kernel of the sm90 backward, by tiles of query rows: dQ from its fp32
// accumulator.
#pragma once
#include <cstdint>

#include "../../ptx/warpgroup.cuh"
#include "config.cuh"
#include "preprocess.cuh"

namespace flashsci::sm90::bwd {

template <class Op, class C, bool kVarlen>
__global__ void __launch_bounds__(kRowThreads)
    backward_postprocess_kernel(const __grid_constant__ BackwardArgs a) {
  constexpr int kPitch = C::kBoxes * 64 + 8;  // elements: rows fall into different banks
  __shared__ __align__(16) uint16_t rows[C::kBlockQ * kPitch];
  const FlashsciBackwardParams& p = a.p;
  const QueryTile tile = find_query_tile<C, kVarlen>(a, blockIdx.x);
  if (tile.count <= 0) return;
  ptx::wait_for_prerequisites();
  const int w = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
  const uint32_t part = blockIdx.x * C::kConsumers + w;
  const auto* accumulator = reinterpret_cast<const float4*>(dq_of<C>(a, part, w));
  float4 x[C::kDqColumns / 8] = {};
  if (wants_dq<C>(a, w)) {
#pragma unroll
    for (int j = 0; j < C::kDqColumns / 8; ++j)
      if (j * 8 < C::dq_columns(w)) x[j] = accumulator[j * 128 + thread];
  }
  const int row = (C::kSplitRows ? w * 64 : 0) + thread / 32 * 16 + lane / 4;
  const int column = (C::kSplitRows ? 0 : w * C::kDqColumns) + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < C::kDqColumns / 8; ++j) {
    auto* pair = reinterpret_cast<uint32_t*>(rows + row * kPitch + column + j * 8);
    pair[0] = Op::pack2(x[j].x * p.scale, x[j].y * p.scale);
    pair[8 * kPitch / 2] = Op::pack2(x[j].z * p.scale, x[j].w * p.scale);
  }
  __syncthreads();
  constexpr int kLanes = row_lanes(C::kBoxes);
  auto* dq = static_cast<uint16_t*>(p.dq) + tile.offset(p.dq_strides);
#pragma unroll
  for (int i = 0; i < C::kBlockQ; i += kRowThreads / kLanes) {
    const int r = i + threadIdx.x / kLanes, c = threadIdx.x % kLanes * 8;
    if (r < tile.count && c < p.head_dim)
      *reinterpret_cast<uint4*>(dq + r * p.dq_strides.row + c) =
          *reinterpret_cast<const uint4*>(rows + r * kPitch + c);
  }
}

}  // namespace flashsci::sm90::bwd
