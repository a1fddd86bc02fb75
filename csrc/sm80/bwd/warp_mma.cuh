// Matrix products of one warp on tiles in shared memory (mma.m16n8k16, fp32 accumulators), for the
// backward kernels.
//
// Fragments: lane = 4 g + t holds of each m16 x n8 block rows g, g + 8 and columns 2t, 2t + 1. The
// accumulator layout of a product, packed to 16 bits, is the left operand of the next one.
#pragma once
#include <cstdint>

#include "../../core/smem_tile.cuh"
#include "../../ptx/ldmatrix.cuh"

namespace flashsci::sm80::bwd {

// This lane's address for an ldmatrix.x4 of a Tile, in bytes from the tile. As left operand, or as
// right operand through the transpose: 16 rows x 1 chunk, twice. As right operand, or as left one
// through the transpose: 8 rows x 2 chunks, twice, so that the registers of an n8 block (of an m16
// block) are neighbours.
template <int kCols>
__device__ __forceinline__ uint32_t lane_by_rows(uint32_t lane = threadIdx.x % 32) {
  return Tile<kCols>::offset(lane % 16, lane / 16);
}
template <int kCols>
__device__ __forceinline__ uint32_t lane_by_chunks(uint32_t lane = threadIdx.x % 32) {
  return Tile<kCols>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// A span of kChunkPairs pairs of chunks (16 columns each), the part-th of its tile. If spans and
// the groups of the swizzle nest, the start absorbs the part; else every address is computed.
template <int kCols, int kChunkPairs>
struct Span {
  using T = Tile<kCols>;
  static constexpr int kGroupPairs = T::kGroup / 2;
  static constexpr bool kNested = kChunkPairs % kGroupPairs == 0 || kGroupPairs % kChunkPairs == 0;
  uint32_t start;
  int first;

  __device__ __forceinline__ Span(uint32_t start_, int part)
      : start(start_), first(part * kChunkPairs) {
    if (kNested) {
      start = at_any(first);
      first = 0;
    }
  }
  __device__ __forceinline__ uint32_t at(int pair) const {
    return kNested ? T::pair_address(start, pair) : at_any(first + pair);
  }
  __device__ __forceinline__ uint32_t at_any(int pair) const {
    return (start ^ (pair % kGroupPairs * 2 * kChunkBytes)) +
           pair / kGroupPairs * T::kGroup * kChunkBytes;
  }
};

template <int kM, int kN>
__device__ __forceinline__ void set_zero(float (&c)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) c[i / (4 * kN)][i / 4 % kN][i % 4] = 0.f;
}

// C += A B^T over all columns: rows of A from a_start (by rows), rows of B from b_start (by
// chunks).
template <class Op, int kCols, int kM, int kN>
__device__ __forceinline__ void multiply_rows(float (&c)[kM][kN][4], uint32_t a_start,
                                              uint32_t b_start) {
  using T = Tile<kCols>;
// In two halves: unrolled whole, the compiler fetches more fragments than registers hold.
#pragma unroll(kCols / 32)
  for (int d = 0; d < kCols / 16; ++d) {
    uint32_t a[kM][4];  // A [16 kM, 16]
#pragma unroll
    for (int m = 0; m < kM; ++m)
      ptx::ldmatrix_x4(a[m], T::pair_address(a_start, d) + m * 16 * T::kRowBytes);
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      uint32_t b[4];  // B [16, 16]: two n8 blocks
      ptx::ldmatrix_x4(b, T::pair_address(b_start, d) + n * 16 * T::kRowBytes);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        Op::mma(c[m][2 * n], a[m], b[0], b[1]);
        Op::mma(c[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// 16 columns of the left operand, from accumulators: c [16 kM, 8 kN] -> a[kN / 2][kM].
template <class Op, int kM, int kN>
__device__ __forceinline__ void pack(uint32_t (&a)[kN / 2][kM][4], const float (&c)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kN / 2 * kM * 4; ++i) {
    const int k = i / (4 * kM), m = i / 4 % kM, part = i % 4;
    const float* pair = &c[m][2 * k + part / 2][part % 2 * 2];
    a[k][m][part] = Op::pack2(pair[0], pair[1]);
  }
}

// C += A B for 16 rows of B, read through the transpose from b (+ row_bytes).
template <class Op, int kCols, int kM, int kN, int kChunkPairs>
__device__ __forceinline__ void multiply_16(float (&c)[kM][kN][4], const uint32_t (&a)[kM][4],
                                            const Span<kCols, kChunkPairs>& b, uint32_t row_bytes) {
  static_assert(kN == 2 * kChunkPairs, "the span has the columns of C");
#pragma unroll
  for (int n = 0; n < kChunkPairs; ++n) {
    uint32_t r[4];  // B [16, 16]: two n8 blocks
    ptx::ldmatrix_x4_trans(r, b.at(n) + row_bytes);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      Op::mma(c[m][2 * n], a[m], r[0], r[1]);
      Op::mma(c[m][2 * n + 1], a[m], r[2], r[3]);
    }
  }
}

}  // namespace flashsci::sm80::bwd
