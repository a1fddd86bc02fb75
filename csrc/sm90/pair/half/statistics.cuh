// The statistics of each query that the backward needs besides q and dout: those of
// ../statistics.cuh, for 16-bit rows.
#pragma once
#include <cuda_runtime.h>

#include "../../../core/coord.cuh"
#include "../../../core/softmax.cuh"
#include "../../../ptx/warpgroup.cuh"
#include "../calls.cuh"

namespace flashsci::sm90::pair::half {

// A head has `rows` entries, a multiple of kRowsOfBlock.
template <class Op>
__global__ void __launch_bounds__(kRowThreads)
    statistics_kernel(const __grid_constant__ FlashsciBackwardParams p, float2* statistics,
                      int64_t rows, uint32_t tiles) {
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();
  const HeadCoord place(blockIdx.x, tiles, p.heads_q, p.batch1);
  const int64_t row =
      int64_t{blockIdx.x - place.batch_head * tiles} * kRowsOfBlock + threadIdx.x / kRowLanes;
  const int column = threadIdx.x % kRowLanes * 8;
  float sum = 0.f;
  if (row < p.seq_q && column < p.head_dim_v) {
    const auto load = [&](const void* data, const FlashsciStrides& strides) {
      return __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) +
                                                  place.offset(strides, place.head) +
                                                  row * strides.row + column));
    };
    const uint4 dout = load(p.dout, p.dout_strides), out = load(p.out, p.out_strides);
    const uint32_t x[4] = {dout.x, dout.y, dout.z, dout.w}, y[4] = {out.x, out.y, out.z, out.w};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      sum = fmaf(Op::to_float(static_cast<uint16_t>(x[i / 2] >> (i % 2 * 16))),
                 Op::to_float(static_cast<uint16_t>(y[i / 2] >> (i % 2 * 16))), sum);
  }
  sum = quad_sum(sum);
  if (threadIdx.x % kRowLanes != 0) return;
  float2& target = statistics[int64_t{place.batch_head} * rows + row];
  if (row >= p.seq_q) {
    target = make_float2(0.f, 0.f);  // padding: P is finite, and rows of zeros add nothing
    return;
  }
  if (p.dlse != nullptr)
    sum -= p.dlse[place.offset(p.dlse_strides, place.head) + row * p.dlse_strides.row];
  const float lse = p.lse[int64_t{place.batch_head} * p.seq_q + row];
  target =
      lse == -INFINITY ? make_float2(-INFINITY, 0.f) : make_float2(-lse_of_backward(lse), -sum);
}

}  // namespace flashsci::sm90::pair::half
