// From the accumulators of one warp to rows in global memory, through shared memory: 16-byte stores
// of whole rows instead of 4 bytes a lane.
#pragma once
#include <cstdint>

#include "../ptx/shared.cuh"
#include "smem_tile.cuh"

namespace flashsci {

// c times factor goes through warp_tile, a Tile of this warp alone, to `target` [rows, columns].
// vector: rows start at multiples of 16 bytes and columns is a multiple of 8.
template <class Op, int kCols, int kM>
__device__ __forceinline__ void store_rows(const float (&c)[kM][kCols / 8][4], float factor,
                                           uint32_t warp_tile, uint16_t* __restrict__ target,
                                           int64_t row_stride, int rows, int columns, bool vector) {
  using T = Tile<kCols>;
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  __syncwarp();  // no lane still reads the old contents
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int d = 0; d < kCols / 8; ++d)
        ptx::st_shared(warp_tile + T::offset(m * 16 + half * 8 + group, d) + quad * 4,
                       Op::pack2(c[m][d][half * 2] * factor, c[m][d][half * 2 + 1] * factor));
  __syncwarp();
  constexpr int kLanesPerRow = T::kGroup;
#pragma unroll
  for (int pass = 0; pass < kM * 16 * kLanesPerRow / 32; ++pass) {
    const int row = pass * (32 / kLanesPerRow) + lane / kLanesPerRow;
    if (row >= rows) break;
#pragma unroll
    for (int block = 0; block < T::kChunks / kLanesPerRow; ++block) {
      const int chunk = lane % kLanesPerRow + block * kLanesPerRow;
      const int left = columns - chunk * kChunkElements;
      if (left <= 0) continue;
      uint16_t* place = target + row * row_stride + chunk * kChunkElements;
      const uint4 value = ptx::ld_shared_v4(warp_tile + T::offset(row, chunk));
      if (vector) {
        *reinterpret_cast<uint4*>(place) = value;
      } else {
        const uint32_t word[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int e = 0; e < kChunkElements; ++e)
          if (e < left) place[e] = static_cast<uint16_t>(word[e / 2] >> (e % 2 * 16));
      }
    }
  }
}

}  // namespace flashsci
