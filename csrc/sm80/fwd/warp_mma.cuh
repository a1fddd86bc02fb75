// Matrix products of one warp of the sm80 forward on tiles in shared memory (mma.m16n8k16, fp32
// accumulators), and element-wise operations on their fragments.
#pragma once
#include <cstdint>

#include "../../core/smem_tile.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "config.cuh"

namespace flashsci::sm80::fwd {

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&x)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][n][e] = 0.f;
}

// S += Q K^T for the rows of one warp.
template <class Op, class C>
__device__ __forceinline__ void multiply_qk(float (&s)[C::kM][C::kN][4], uint32_t q_start,
                                            uint32_t k_start) {
  using T = Tile<C::kHeadDim>;
#pragma unroll
  for (int d = 0; d < C::kHeadDim / 16; ++d) {
    uint32_t a[C::kM][4];  // Q [kRows, 16]
#pragma unroll
    for (int m = 0; m < C::kM; ++m)
      ptx::ldmatrix_x4(a[m], T::pair_address(q_start, d) + m * 16 * T::kRowBytes);
#pragma unroll
    for (int n = 0; n < C::kN / 2; ++n) {
      uint32_t b[4];  // K [16 keys, 16]: two n8 blocks
      ptx::ldmatrix_x4(b, T::pair_address(k_start, d) + n * 16 * T::kRowBytes);
#pragma unroll
      for (int m = 0; m < C::kM; ++m) {
        Op::mma(s[m][2 * n], a[m], b[0], b[1]);
        Op::mma(s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// O += P V; the accumulator layout of S is the operand layout of P.
template <class Op, class C>
__device__ __forceinline__ void multiply_pv(float (&o)[C::kM][C::kDimBlocks][4],
                                            const float (&p)[C::kM][C::kN][4], uint32_t v_start) {
  using T = Tile<C::kHeadDim>;
#pragma unroll
  for (int n = 0; n < C::kN / 2; ++n) {
    uint32_t a[C::kM][4];  // P [kRows, 16 keys]
#pragma unroll
    for (int m = 0; m < C::kM; ++m) {
      a[m][0] = Op::pack2(p[m][2 * n][0], p[m][2 * n][1]);
      a[m][1] = Op::pack2(p[m][2 * n][2], p[m][2 * n][3]);
      a[m][2] = Op::pack2(p[m][2 * n + 1][0], p[m][2 * n + 1][1]);
      a[m][3] = Op::pack2(p[m][2 * n + 1][2], p[m][2 * n + 1][3]);
    }
#pragma unroll
    for (int d = 0; d < C::kDimBlocks / 2; ++d) {
      uint32_t b[4];  // V [16 keys, 16 columns]: two n8 blocks
      ptx::ldmatrix_x4_trans(b, T::pair_address(v_start, d) + n * 16 * T::kRowBytes);
#pragma unroll
      for (int m = 0; m < C::kM; ++m) {
        Op::mma(o[m][2 * d], a[m], b[0], b[1]);
        Op::mma(o[m][2 * d + 1], a[m], b[2], b[3]);
      }
    }
  }
}
// S += Q K^T with Q in registers.
template <class Op, class C>
__device__ __forceinline__ void multiply_kept_qk(float (&s)[C::kM][C::kN][4],
                                                 const uint32_t (&q)[C::kHeadDim / 16][C::kM][4],
                                                 uint32_t k_start) {
  using T = Tile<C::kHeadDim>;
#pragma unroll
  for (int d = 0; d < C::kHeadDim / 16; ++d) {
#pragma unroll
    for (int n = 0; n < C::kN / 2; ++n) {
      uint32_t b[4];  // K [16 keys, 16]: two n8 blocks
      ptx::ldmatrix_x4(b, T::pair_address(k_start, d) + n * 16 * T::kRowBytes);
#pragma unroll
      for (int m = 0; m < C::kM; ++m) {
        Op::mma(s[m][2 * n], q[d][m], b[0], b[1]);
        Op::mma(s[m][2 * n + 1], q[d][m], b[2], b[3]);
      }
    }
  }
}

}  // namespace flashsci::sm80::fwd
