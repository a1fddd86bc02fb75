// Online softmax of the sm90 forward on 8-bit floats: P = 2^(factor S - offset), where the offset
// is the row's running maximum minus kLargestP, so that e4m3, which ends at 448, holds P in the
// middle of its range. The factor cancels in the row sum and so in the lse. The sum of a block is
// that of the rounded P: a column of its product with V (mainloop.cuh).
#pragma once
#include <cstdint>

#include "../../core/softmax.cuh"
#include "../../ptx/convert.cuh"
#include "../../ptx/math.cuh"
#include "../fwd/softmax.cuh"

namespace flashsci::sm90::fp8 {

// log2 of P at a row's maximum, and the growth of a later score that makes the offset follow: 256 *
// 2^0.75 = 431.
inline constexpr float kLargestP = 8.f, kLargestExponent = 8.75f;

// The offset at a largest score, rounded down: P of that score is at least 256.
__device__ __forceinline__ float offset_at(float maximum, float factor) {
  return fmaxf(__fadd_rd(__fmul_rd(maximum, factor), -kLargestP), kUninitializedMax);
}

// Whether an exponent of the warp exceeds the limit of P. With the offset at the maximum, that
// happens only in rows of large scores, by their roundings.
__device__ __forceinline__ bool outgrows(const float (&maximum)[2], const RowStatistics& rows,
                                         float factor) {
  return __any_sync(0xffffffffu,
                    fmaf(maximum[0], factor, -rows.row_max_log2[0]) > kLargestExponent ||
                        fmaf(maximum[1], factor, -rows.row_max_log2[1]) > kLargestExponent);
}

// The offsets of rows whose scores grew too much follow the maximum of a block; earlier sums are
// multiplied by alpha, the row sum here, O by the caller. The other rows of the warp keep theirs,
// so that a row's result depends on no other row.
__device__ __forceinline__ void follow(const float (&maximum)[2], RowStatistics& rows,
                                       float (&alpha)[2], float factor) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float before = rows.row_max_log2[half], top = quad_max(maximum[half]);
    const bool grew = fmaf(top, factor, -before) > kLargestExponent;
    const float next = grew ? fmaxf(before, offset_at(top, factor)) : before;
    alpha[half] = ptx::ex2_approx(before - next);
    rows.row_max_log2[half] = next;
    rows.sum[half] *= alpha[half];
  }
}

// S as exponents.
struct Exponent {
  float factor, offset[2];
  __device__ __forceinline__ float of(float s, int e) const {
    return fmaf(s, factor, -offset[e >> 1 & 1]);
  }
};

// S becomes P.
template <int kCount>
__device__ __forceinline__ void exponentials(float (&s)[kCount], const Exponent& exponent) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) s[e] = ptx::ex2_approx(exponent.of(s[e], e));
}

// P as operand, per 32 keys: 8 columns of S that are not neighbours are in one register
// (transpose.cuh has V in that order).
template <int kCount>
__device__ __forceinline__ void pack(uint32_t (&p)[kCount / 16][4], const float (&s)[kCount]) {
#pragma unroll
  for (int b = 0; b < kCount / 16; ++b)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = b * 16 + (i >> 1) * 8 + (i & 1) * 2;
      p[b][i] = ptx::cvt_e4m3x4(s[e], s[e + 1], s[e + 4], s[e + 5]);
    }
}

}  // namespace flashsci::sm90::fp8
