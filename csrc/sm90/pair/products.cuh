// Products of fp32 for one warp: three of TF32 numbers each, high and low parts of 11 bits, for
// fp32 accuracy. Unlike fp16 halves (core/split_fp16.cuh) they have fp32's range and need no
// scales, at half the tensor-core rate, for which these kernels hardly wait.
//
// Terms of a product may come in any order. Where the fragments of m16n8k8 want columns t and t +
// 4, a lane takes two neighbouring dims of a row, or rows of its pairs of P.
#pragma once
#include <cstdint>

#include "../../ptx/mma.cuh"
#include "../../ptx/shared.cuh"
#include "config.cuh"

namespace flashsci::sm90::pair {

// x = high + low: high is rounded to 11 bits, low is truncated by TF32; the error is 2^-23 of x.
template <int kCount>
struct Split {
  uint32_t high[kCount], low[kCount];

  __device__ __forceinline__ void set(int i, float x) {
    high[i] = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low[i] = __float_as_uint(x - __uint_as_float(high[i]));
  }
};

// Tensor cores round every partial sum towards zero: small products come first.
__device__ __forceinline__ void multiply_small(float (&c)[4], const Split<4>& a,
                                               const Split<2>& b) {
  ptx::mma_m16n8k8_tf32(c, a.low, b.high);
  ptx::mma_m16n8k8_tf32(c, a.high, b.low);
}

// The place of a byte of a row of a tile. Rows of 96 bytes have few bank conflicts as they are;
// 16-byte pieces of rows of 128 bytes are exchanged, as TMA writes them.
template <int kDim>
__device__ __forceinline__ uint32_t place_of(int row, int byte) {
  return row * kDim * 4 + (kDim == 32 ? byte ^ (row & 7) * 16 : byte);
}

// C += A B^T for tiles of kWarpRows rows.
template <int kDim>
__device__ __forceinline__ void multiply_transposed(float (&c)[2][4], uint32_t a, uint32_t b) {
  constexpr int kEight = 8 * kDim * 4;  // bytes of eight rows
  const int group = threadIdx.x / 4 % 8, quad = threadIdx.x % 4;
  float small[2][4] = {};
#pragma unroll
  for (int d = 0; d < kDim / 8; ++d) {
    Split<4> rows;
    const uint32_t at = place_of<kDim>(group, d * 32 + quad * 8);  // also for the row 8 later
    const float2 upper = ptx::ld_shared_f2(a + at), lower = ptx::ld_shared_f2(a + at + kEight);
    rows.set(0, upper.x), rows.set(1, lower.x), rows.set(2, upper.y), rows.set(3, lower.y);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 x = ptx::ld_shared_f2(b + at + n * kEight);
      Split<2> columns;
      columns.set(0, x.x), columns.set(1, x.y);
      multiply_small(small[n], rows, columns);
      ptx::mma_m16n8k8_tf32(c[n], rows.high, columns.high);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) c[i / 4][i % 4] += small[i / 4][i % 4];
}

// C += P B for a tile of kWarpRows rows.
template <int kDim>
__device__ __forceinline__ void multiply(float (&c)[kDim / 8][4], const float (&p)[2][4],
                                         uint32_t b) {
  const int group = threadIdx.x / 4 % 8, quad = threadIdx.x % 4;
  Split<4> rows[2];
#pragma unroll
  for (int i = 0; i < 8; ++i) rows[i / 4].set(i % 4, p[i / 4][i % 2 * 2 + i / 2 % 2]);
#pragma unroll
  for (int d = 0; d < kDim / 8; ++d) {
    const int byte = (d * 8 + group) * 4;
    Split<2> columns[2];
    float sum[4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t tile = b + n * 8 * kDim * 4;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        columns[n].set(i,
                       __uint_as_float(ptx::ld_shared(tile + place_of<kDim>(2 * quad + i, byte))));
      multiply_small(sum, rows[n], columns[n]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) ptx::mma_m16n8k8_tf32(sum, rows[n].high, columns[n].high);
#pragma unroll
    for (int e = 0; e < 4; ++e) c[d][e] += sum[e];
  }
}

}  // namespace flashsci::sm90::pair
