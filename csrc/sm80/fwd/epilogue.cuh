// From accumulators to output and lse in global memory.
#pragma once
#include <cmath>
#include <cstdint>

#include "../../core/smem_tile.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/shared.cuh"
#include "config.cuh"
#include "rows.cuh"

namespace flashsci::sm80::fwd {

// Normalises, writes lse, and sends the rows of one warp to global memory through its part of the Q
// tile.
template <class Op, class C>
__device__ __forceinline__ void write_output(const OutputRows<C>& of, uint32_t warp_tile,
                                             uint16_t* __restrict__ out,  // [rows, Dv] of this warp
                                             float* __restrict__ lse,     // [rows] of this warp
                                             int64_t row_stride, int rows, int head_dim_v,
                                             const ForwardPlan& plan) {
  using T = Tile<C::kHeadDim>;
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  __syncwarp();  // all lanes have read their last Q fragments
#pragma unroll
  for (int m = 0; m < C::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(of.row_sum[m][half]);
      const float inverse = sum == 0.f ? 0.f : 1.f / sum;
      const int row = m * 16 + half * 8 + group;
      if (quad == 0 && row < rows)
        lse[row] = sum == 0.f ? -INFINITY : fmaf(of.row_max[m][half], plan.lse_scale, logf(sum));
#pragma unroll
      for (int d = 0; d < C::kDimBlocks; ++d)
        ptx::st_shared(
            warp_tile + T::offset(row, d) + quad * 4,
            Op::pack2(of.o[m][d][half * 2] * inverse, of.o[m][d][half * 2 + 1] * inverse));
    }
  }
  __syncwarp();
  constexpr int kLanesPerRow = T::kGroup;
#pragma unroll
  for (int pass = 0; pass < C::kRows * kLanesPerRow / 32; ++pass) {
    const int row = pass * (32 / kLanesPerRow) + lane / kLanesPerRow;
    if (row >= rows) break;
#pragma unroll
    for (int block = 0; block < T::kChunks / kLanesPerRow; ++block) {
      const int chunk = lane % kLanesPerRow + block * kLanesPerRow;
      const int columns = head_dim_v - chunk * kChunkElements;
      uint16_t* target = out + row * row_stride + chunk * kChunkElements;
      if (columns <= 0) continue;
      const uint4 value = ptx::ld_shared_v4(warp_tile + T::offset(row, chunk));
      if (plan.vector_out) {
        *reinterpret_cast<uint4*>(target) = value;
      } else {
        const uint32_t word[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int e = 0; e < kChunkElements; ++e)
          if (e < columns) target[e] = static_cast<uint16_t>(word[e / 2] >> (e % 2 * 16));
      }
    }
  }
}

// Normalises, writes lse and output from registers: the lanes of a quad exchange the words of four
// n8 blocks, so that each has 16 bytes in a row.
template <class Op, class C>
__device__ __forceinline__ void store_rows(const OutputRows<C>& of,
                                           uint16_t* __restrict__ out,  // [rows, Dv] of this warp
                                           float* __restrict__ lse,     // [rows] of this warp
                                           int64_t row_stride, int rows, int head_dim_v,
                                           const ForwardPlan& plan) {
  const int group = threadIdx.x / 4 % 8, quad = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < C::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(of.row_sum[m][half]);
      const float inverse = sum == 0.f ? 0.f : 1.f / sum;
      const int row = m * 16 + half * 8 + group;
      if (quad == 0 && row < rows)
        lse[row] = sum == 0.f ? -INFINITY : fmaf(of.row_max[m][half], plan.lse_scale, logf(sum));
#pragma unroll
      for (int block = 0; block < C::kDimBlocks / 4; ++block) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          word[i] = Op::pack2(of.o[m][block * 4 + i][half * 2] * inverse,
                              of.o[m][block * 4 + i][half * 2 + 1] * inverse);
        transpose_quad(word);
        const int columns = head_dim_v - (block * 4 + quad) * kChunkElements;
        uint16_t* target = out + row * row_stride + (block * 4 + quad) * kChunkElements;
        if (row >= rows || columns <= 0) continue;
        if (plan.vector_out) {
          *reinterpret_cast<uint4*>(target) = make_uint4(word[0], word[1], word[2], word[3]);
        } else {
#pragma unroll
          for (int e = 0; e < kChunkElements; ++e)
            if (e < columns) target[e] = static_cast<uint16_t>(word[e / 2] >> (e % 2 * 16));
        }
      }
    }
  }
}

}  // namespace flashsci::sm80::fwd
