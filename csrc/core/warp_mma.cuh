// Products of fragments in registers with tiles in shared memory, by mma of m16 x n8 x k16.
//
// Op::mma(c, a, b0, b1) and the fragment layouts are those of ptx/mma_f16.cuh; on Turing one is two
// m16n8k8. `start` is the shared address of this lane's row of an ldmatrix: see each function.
#pragma once
#include <cstdint>

#include "../ptx/ldmatrix.cuh"
#include "smem_tile.cuh"

namespace flashsci {

// Address offsets of a lane in a Tile. As left operand, or as right operand through the transpose:
// 16 rows x 1 chunk, twice. As right operand: 8 rows x 2 chunks for each n8 block, so that the two
// registers of a block are neighbours.
template <int kCols>
__device__ __forceinline__ uint32_t row_fragment(int lane) {
  return Tile<kCols>::offset(lane % 16, lane / 16);
}
template <int kCols>
__device__ __forceinline__ uint32_t column_fragment(int lane) {
  return Tile<kCols>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

template <int kM, int kN>
__device__ __forceinline__ void set_zero(float (&c)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) c[i / (4 * kN)][i / 4 % kN][i % 4] = 0.f;
}

// The first 16 kHeld columns of a left operand of 16 kM rows; start by row_fragment.
template <int kCols, int kM, int kHeld>
__device__ __forceinline__ void load_rows(uint32_t (&a)[kM][kHeld][4], uint32_t start) {
  using T = Tile<kCols>;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int d = 0; d < kHeld; ++d)
      ptx::ldmatrix_x4(a[m][d], T::pair_address(start, d) + m * 16 * T::kRowBytes);
}

// C += A B^T for B [8 kN rows, kCols]; start by column_fragment. The first 16 kHeld columns of A
// are in registers; the others are a separate tile, read from rest, by row_fragment.
template <class Op, int kCols, int kM, int kHeld, int kN>
__device__ __forceinline__ void multiply_transposed(float (&c)[kM][kN][4],
                                                    const uint32_t (&held)[kM][kHeld][4],
                                                    uint32_t start, uint32_t rest = 0) {
  using T = Tile<kCols>;
#pragma unroll
  for (int d = 0; d < kCols / 16; ++d) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if (d < kHeld) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = held[m][d < kHeld ? d : 0][i];
      } else if constexpr (kHeld < kCols / 16) {
        using Rest = Tile<kCols - 16 * kHeld>;
        ptx::ldmatrix_x4(a[m], Rest::pair_address(rest, d - kHeld) + m * 16 * Rest::kRowBytes);
      }
    }
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      uint32_t b[4];  // B [16 rows, 16 columns]: two n8 blocks
      ptx::ldmatrix_x4(b, T::pair_address(start, d) + n * 16 * T::kRowBytes);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        Op::mma(c[m][2 * n], a[m], b[0], b[1]);
        Op::mma(c[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// 16 columns of the left operand, from accumulators (their layout is that of operands): n8 blocks
// 2n and 2n + 1 of p.
template <class Op, int kM, int kN>
__device__ __forceinline__ void pack(uint32_t (&a)[kM][4], const float (&p)[kM][kN][4], int n) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[m][i] = Op::pack2(p[m][2 * n + i / 2][i % 2 * 2], p[m][2 * n + i / 2][i % 2 * 2 + 1]);
}

// C += A B for A [16 kM rows, 16] and B [16 rows, kCols]; start by row_fragment.
template <class Op, int kCols, int kM>
__device__ __forceinline__ void multiply_16(float (&c)[kM][kCols / 8][4],
                                            const uint32_t (&a)[kM][4], uint32_t start) {
#pragma unroll
  for (int d = 0; d < kCols / 16; ++d) {
    uint32_t b[4];  // B [16 rows, 16 columns]: two n8 blocks
    ptx::ldmatrix_x4_trans(b, Tile<kCols>::pair_address(start, d));
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      Op::mma(c[m][2 * d], a[m], b[0], b[1]);
      Op::mma(c[m][2 * d + 1], a[m], b[2], b[3]);
    }
  }
}

// C += P B for B [8 kN rows, kCols]; start by row_fragment.
template <class Op, int kCols, int kM, int kN>
__device__ __forceinline__ void multiply_accumulators(float (&c)[kM][kCols / 8][4],
                                                      const float (&p)[kM][kN][4], uint32_t start) {
#pragma unroll
  for (int n = 0; n < kN / 2; ++n) {
    uint32_t a[kM][4];
    pack<Op>(a, p, n);
    multiply_16<Op, kCols>(c, a, start + n * 16 * Tile<kCols>::kRowBytes);
  }
}

}  // namespace flashsci
