// From accumulators to gradients in global memory.
#pragma once
#include "../../core/smem_tile.cuh"
#include "../../ptx/shared.cuh"
#include "bias_mask.cuh"

namespace flashsci::sm80::bwd {

// One warp's c times factor -> columns [8 chunk, ...) of its rows in a tile -> global memory.
// kKeys: rows are keys, in the rows of the tile that row_of_key gives.
template <class Op, int kCols, bool kKeys, int kM, int kN>
__device__ __forceinline__ void store_gradient(const float (&c)[kM][kN][4], float factor,
                                               uint32_t tile, int chunk,
                                               uint16_t* __restrict__ global,  // [rows, columns]
                                               int64_t row_stride, int rows, int columns,
                                               bool vector) {
  using T = Tile<kCols>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kN; ++n)
        ptx::st_shared(tile + T::offset(m * 16 + half * 8 + lane / 4, chunk + n) + lane % 4 * 4,
                       Op::pack2(c[m][n][half * 2] * factor, c[m][n][half * 2 + 1] * factor));
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < kM * 16 * kN; i += 32) {
    const int row = i / kN, at = chunk + i % kN;
    const int left = columns - at * kChunkElements;
    if (row >= rows || left <= 0) continue;
    const uint4 value = ptx::ld_shared_v4(tile + T::offset(kKeys ? row_of_key<kM>(row) : row, at));
    uint16_t* target = global + row * row_stride + at * kChunkElements;
    if (vector) {
      *reinterpret_cast<uint4*>(target) = value;
    } else {
      const uint32_t word[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
      for (int e = 0; e < kChunkElements; ++e)
        if (e < left) target[e] = static_cast<uint16_t>(word[e / 2] >> (e % 2 * 16));
    }
  }
}

// The rows [0, rows) of one warp's c times factor, columns from first_column on, directly to global
// memory.
template <class Op, int kM, int kN>
__device__ __forceinline__ void store_rows_direct(const float (&c)[kM][kN][4], float factor,
                                                  uint16_t* __restrict__ global,  // [rows, columns]
                                                  int64_t row_stride, int rows, int first_column,
                                                  int columns, bool bias_mask) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8 + lane / 4;
      if (row >= rows) continue;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int column = first_column + n * 8 + lane % 4 * 2;
        uint16_t* target = global + row * row_stride + column;
        const uint32_t packed =
            Op::pack2(c[m][n][half * 2] * factor, c[m][n][half * 2 + 1] * factor);
        if (bias_mask && column < columns) {
          *reinterpret_cast<uint32_t*>(target) = packed;
        } else {
          if (column < columns) target[0] = static_cast<uint16_t>(packed);
          if (column + 1 < columns) target[1] = static_cast<uint16_t>(packed >> 16);
        }
      }
    }
  }
}

// Zeros for rows of dq that see no key.
__device__ __forceinline__ void zero_rows(uint16_t* __restrict__ global, int64_t row_stride,
                                          int rows, int columns, int threads) {
  for (int row = threadIdx.x / 32; row < rows; row += threads / 32)
    for (int column = threadIdx.x % 32; column < columns; column += 32)
      global[row * row_stride + column] = 0;
}

}  // namespace flashsci::sm80::bwd
