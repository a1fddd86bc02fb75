// The statistics of each query row that the backward needs besides q and dout.
//
// statistics_i = (-lse_of_backward(lse_i), -delta_i), delta_i = sum_d dout_id out_id - dlse_i;
// (-inf, 0) where a row sees no key. A row is read by 4 to 32 lanes, 16 bytes each.
#pragma once
#include <cmath>
#include <cstdint>

#include "../include/flashsci.h"
#include "../ptx/shared.cuh"
#include "coord.cuh"
#include "smem_tile.cuh"
#include "softmax.cuh"

namespace flashsci {

inline constexpr int kRowThreads = 256;

// (-lse, -delta) of two neighbouring queries.
__device__ __forceinline__ float4 load_statistics(uint32_t shared) {
  const uint4 x = ptx::ld_shared_v4(shared);
  return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                     __uint_as_float(x.w));
}

// Whether the lse of any of 8 kN queries, columns of the warp's fragments, is large. statistics:
// the entry of this lane's first query in shared memory.
template <int kN>
__device__ __forceinline__ bool any_large_column(uint32_t statistics) {
  static_assert(kN <= 8 && 8 % kN == 0, "the lanes of a column share the blocks of 8 among them");
  const float4 x = load_statistics(statistics + threadIdx.x % 32 / 4 % kN * 64);
  return __any_sync(0xffffffffu, is_large(x.x) || is_large(x.z));
}

// Elements 8 chunk .. 8 chunk + 7 of a row; columns past the last are 0.
template <class Op>
__device__ __forceinline__ void load_row(float (&x)[kChunkElements],
                                         const uint16_t* __restrict__ row, int chunk, int columns,
                                         bool vector) {
  const int left = columns - chunk * kChunkElements;
  const uint16_t* source = row + chunk * kChunkElements;
  uint32_t word[4] = {0, 0, 0, 0};
  if (vector) {
    if (left > 0) {
      const uint4 value = __ldg(reinterpret_cast<const uint4*>(source));
      word[0] = value.x, word[1] = value.y, word[2] = value.z, word[3] = value.w;
    }
  } else {
#pragma unroll
    for (int e = 0; e < kChunkElements; ++e)
      if (e < left) word[e / 2] |= static_cast<uint32_t>(__ldg(source + e)) << (e % 2 * 16);
  }
#pragma unroll
  for (int e = 0; e < kChunkElements; ++e)
    x[e] = Op::to_float(static_cast<uint16_t>(word[e / 2] >> (e % 2 * 16)));
}

// Run by a block of kRowThreads; `lanes` threads share a row, and each head has `tiles` blocks.
template <class Op, class Plan>
__device__ __forceinline__ void find_statistics(const FlashsciBackwardParams& p, const Plan& plan,
                                                uint32_t tiles, int lanes, int vector) {
  const TileCoord place(blockIdx.x, tiles, p.heads_q, p);
  const int row = place.tile * (kRowThreads / lanes) + threadIdx.x / lanes;
  const int chunk = threadIdx.x % lanes;
  float sum = 0.f;
  if (row < p.seq_q && p.dout != nullptr) {
    const int64_t at = row;
    float dout[kChunkElements], out[kChunkElements];
    load_row<Op>(dout,
                 static_cast<const uint16_t*>(p.dout) + place.offset(p.dout_strides, place.head) +
                     at * p.dout_strides.row,
                 chunk, p.head_dim_v, vector != 0);
    load_row<Op>(out,
                 static_cast<const uint16_t*>(p.out) + place.offset(p.out_strides, place.head) +
                     at * p.out_strides.row,
                 chunk, p.head_dim_v, vector != 0);
#pragma unroll
    for (int e = 0; e < kChunkElements; ++e) sum = fmaf(dout[e], out[e], sum);
  }
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (row < p.seq_q && chunk == 0) {
    const int64_t at = (static_cast<int64_t>(place.batch) * p.heads_q + place.head) * p.seq_q + row;
    const float lse = p.lse[at];
    if (p.dlse != nullptr)
      sum -= p.dlse[place.offset(p.dlse_strides, place.head) + row * p.dlse_strides.row];
    plan.statistics[at] =
        lse == -INFINITY ? make_float2(-INFINITY, 0.f) : make_float2(-lse_of_backward(lse), -sum);
  }
}

}  // namespace flashsci
