// Matrix products of halves (core/split_fp16.cuh) for one warp: three mma of fp16 for each product
// of fp32 (kThree), or one, with the accuracy of TF32.
//
// Tensor cores round every partial sum towards zero. The two small products go first, when the sums
// are 2^-11 of their final size, so that only one truncation for every 16 terms counts.
#pragma once
#include <cstdint>

#include "../../core/split_fp16.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/mma.cuh"

namespace flashsci::sm80 {

// The addresses of a lane's fragments in tiles of halves.
// A operand: 16 rows x 16 dims.
template <class Tile>
__device__ __forceinline__ uint32_t start_of_a(uint32_t tile, int row) {
  const int lane = threadIdx.x % 32;
  return tile + Tile::Rows::offset(row + lane % 16, lane / 16);
}
// B operand, rows are its columns: `mixed` 8 rows x 16 dims, high and low; `high` 16 rows x 16
// dims.
template <class Tile>
__device__ __forceinline__ uint32_t start_of_rows(uint32_t tile, bool mixed) {
  const uint32_t lane = opaque(threadIdx.x) % 32;  // recomputed: a register less
  return mixed ? tile + Tile::Rows::offset(lane % 8, lane / 8 % 2) + lane / 16 * Tile::kLowBytes
               : tile + Tile::Rows::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
// B operand, dims are its columns: `mixed` 16 rows x 8 dims, high and low; `high` 16 rows x 16
// dims.
template <class Tile>
__device__ __forceinline__ uint32_t start_of_dims(uint32_t tile, bool mixed) {
  const int lane = threadIdx.x % 32;
  return mixed ? tile + Tile::Rows::offset(lane % 16, 0) + lane / 16 * Tile::kLowBytes
               : tile + Tile::Rows::offset(lane % 16, lane / 16);
}

// s = A B^T for rows of tiles A (from a_start) and B (from b_mixed, b_high), in units of their
// scales.
template <class TileA, class TileB, int kDim, int kM, int kN>
__device__ __forceinline__ void multiply_rows(float (&s)[kM][kN][4], uint32_t a_start,
                                              uint32_t b_mixed, uint32_t b_high, bool three) {
  using A = typename TileA::Rows;
  using B = typename TileB::Rows;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][n][e] = 0.f;
  if (three) {
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t high[kM][4], low[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::ldmatrix_x4(high[m], A::at(a_start, 2 * d) + m * 16 * A::kRowBytes);
        ptx::ldmatrix_x4(low[m], A::at(a_start, 2 * d) + m * 16 * A::kRowBytes + TileA::kLowBytes);
      }
      constexpr int kBatch = kN % 4 == 0 ? 4 : 2;  // spaces out the mma of one accumulator
#pragma unroll
      for (int n = 0; n < kN; n += kBatch) {
        uint32_t b[kBatch][4];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          ptx::ldmatrix_x4(b[i], B::at(b_mixed, 2 * d) + (n + i) * 8 * B::kRowBytes);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
#pragma unroll
          for (int m = 0; m < kM; ++m) ptx::mma_m16n8k16_f16(s[m][n + i], low[m], b[i][0], b[i][1]);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
#pragma unroll
          for (int m = 0; m < kM; ++m)
            ptx::mma_m16n8k16_f16(s[m][n + i], high[m], b[i][2], b[i][3]);
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] *= 1.f / kLowScale;
  }
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
      ptx::ldmatrix_x4(a[m], A::at(a_start, 2 * d) + m * 16 * A::kRowBytes);
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, B::at(b_high, 2 * d) + n * 16 * B::kRowBytes);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma_m16n8k16_f16(s[m][2 * n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16_f16(s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// An A operand in registers, 16 rows x kN x 8 columns for each m.
template <int kM, int kN>
struct Operand {
  uint32_t high[kM][kN / 2][4], low[kM][kN / 2][4];

  // From accumulators, which have the same layout.
  __device__ __forceinline__ void take(const float (&x)[kM][kN][4], bool three) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          halve(x[m][n][half * 2], x[m][n][half * 2 + 1], high[m][n / 2][n % 2 * 2 + half],
                low[m][n / 2][n % 2 * 2 + half]);
  }
};

// o += factor * A B for an operand in registers and the rows of tile B. kTogether: n8 blocks of o
// that are summed up at a time.
template <class TileB, int kDim, int kTogether = 4, int kM, int kN>
__device__ __forceinline__ void multiply_dims(float (&o)[kM][kDim / 8][4], const Operand<kM, kN>& a,
                                              uint32_t b_mixed, uint32_t b_high,
                                              const float (&factor)[kM][2], bool three) {
  using B = typename TileB::Rows;
  constexpr int kBlocks = kDim / 8;
  constexpr int kGroup = kBlocks % kTogether == 0 ? kTogether : 2;
#pragma unroll
  for (int group = 0; group < kBlocks; group += kGroup) {
    float sum[kM][kGroup][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int d = 0; d < kGroup; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[m][d][e] = 0.f;
    if (three) {
#pragma unroll
      for (int n = 0; n < kN / 2; ++n) {
        uint32_t high[kM][4];  // times 2^-11, as the low halves of B are 2^11 too large
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            high[m][e] = ptx::mul_f16x2(a.high[m][n][e], kInverseLowScale2);
        uint32_t b[kGroup][4];
#pragma unroll
        for (int d = 0; d < kGroup; ++d)
          ptx::ldmatrix_x4_trans(b[d], B::at(b_mixed, group + d) + n * 16 * B::kRowBytes);
#pragma unroll
        for (int d = 0; d < kGroup; ++d)
#pragma unroll
          for (int m = 0; m < kM; ++m)
            ptx::mma_m16n8k16_f16(sum[m][d], a.low[m][n], b[d][0], b[d][1]);
#pragma unroll
        for (int d = 0; d < kGroup; ++d)
#pragma unroll
          for (int m = 0; m < kM; ++m) ptx::mma_m16n8k16_f16(sum[m][d], high[m], b[d][2], b[d][3]);
      }
    }
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
#pragma unroll
      for (int d = 0; d < kGroup / 2; ++d) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, B::at(b_high, group + 2 * d) + n * 16 * B::kRowBytes);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::mma_m16n8k16_f16(sum[m][2 * d], a.high[m][n], b[0], b[1]);
          ptx::mma_m16n8k16_f16(sum[m][2 * d + 1], a.high[m][n], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int d = 0; d < kGroup; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          o[m][group + d][e] = fmaf(sum[m][d][e], factor[m][e / 2], o[m][group + d][e]);
  }
}

}  // namespace flashsci::sm80
