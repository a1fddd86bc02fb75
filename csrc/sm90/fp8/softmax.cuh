// Online softmax of the sm90 forward on 8-bit floats: P = 2^(factor S - offset), where the offset is
// the row's running maximum less kLargestP, so that e4m3, which ends at 448, holds P in the middle
// of its range. The row sum and so the lse take the factor back by themselves.
#pragma once
#include <cstdint>

#include "../../core/softmax.cuh"
#include "../../ptx/cvt_e4m3.cuh"
#include "../../ptx/math.cuh"
#include "../fwd/softmax.cuh"

namespace flashsci::sm90::fp8 {

using fwd::lane_max;
using fwd::RowStatistics;

// log2 of P at a row's maximum, and how far a later score may outgrow it before the offset follows:
// 256 * 2^0.75 = 431.
inline constexpr float kLargestP = 8.f, kLargestExponent = 8.75f;

// The offset at a largest score, rounded down: P of that score is at least 256.
__device__ __forceinline__ float offset_at(float maximum, float factor) {
  return fmaxf(__fadd_rd(__fmul_rd(maximum, factor), -kLargestP), fwd::kUninitializedMax);
}

// Rows that have seen no key get their offset, if there is one now. Whether some of the warp have not.
template <int kCount>
__device__ __forceinline__ bool begin_rows(const float (&s)[kCount], RowStatistics& rows,
                                           float factor) {
  float maximum[2];
  lane_max(s, maximum);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float first = offset_at(quad_max(maximum[half]), factor);
    if (rows.row_max_log2[half] == fwd::kUninitializedMax) rows.row_max_log2[half] = first;
  }
  return __any_sync(0xffffffffu, rows.row_max_log2[0] == fwd::kUninitializedMax ||
                                     rows.row_max_log2[1] == fwd::kUninitializedMax);
}

// The exponents of scores: x = factor s - offset, in the place of s.
template <int kCount>
__device__ __forceinline__ void exponents(float (&s)[kCount], const RowStatistics& rows,
                                          float factor) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) s[e] = fmaf(s[e], factor, -rows.row_max_log2[e >> 1 & 1]);
}

// Whether an exponent of the warp is beyond what P may have, or NaN. As integers, floats above a
// positive one are in order, and two of them are compared with the largest in one instruction.
template <int kCount>
__device__ __forceinline__ bool outgrow(const float (&x)[kCount]) {
  int largest[2] = {__float_as_int(x[0]), __float_as_int(x[1])};
#pragma unroll
  for (int e = 2; e < kCount; e += 2)
    largest[e >> 1 & 1] =
        max(max(largest[e >> 1 & 1], __float_as_int(x[e])), __float_as_int(x[e + 1]));
  return __any_sync(0xffffffffu, max(largest[0], largest[1]) > __float_as_int(kLargestExponent));
}

// The offsets of rows that outgrew theirs follow the largest exponent of a block, and exponents are
// taken from there; what was summed before is to be multiplied by alpha. The other rows of the warp keep
// theirs: what becomes of a row depends on no other.
template <int kCount>
__device__ __forceinline__ void follow(float (&x)[kCount], RowStatistics& rows, float (&alpha)[2]) {
  float maximum[2], by[2];
  lane_max(x, maximum);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float before = rows.row_max_log2[half], top = quad_max(maximum[half]);
    const float next =
        top > kLargestExponent ? __fadd_rd(before, __fadd_rd(top, -kLargestP)) : before;
    by[half] = next - before;
    alpha[half] = ptx::ex2_approx(-by[half]);
    rows.row_max_log2[half] = next;
    rows.sum[half] *= alpha[half];
  }
#pragma unroll
  for (int e = 0; e < kCount; ++e) x[e] = fminf(x[e] - by[e >> 1 & 1], kLargestExponent);
}

// Exponents become P.
template <int kCount>
__device__ __forceinline__ void powers(float (&x)[kCount], RowStatistics& rows) {
  float part[4];  // this lane's sums, in four chains
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    x[e] = ptx::ex2_approx(x[e]);
    part[e & 3] = e < 4 ? x[e] : part[e & 3] + x[e];
  }
  rows.sum[0] += part[0] + part[1];
  rows.sum[1] += part[2] + part[3];
}

// P as operand, per 32 keys, from element kFirst of p: 8 columns of S apart from each other lie in one
// register (transpose.cuh has V in that order).
template <int kFirst, int kCount, int kAll>
__device__ __forceinline__ void pack(uint32_t (&p)[kAll][4], const float (&s)[kCount]) {
#pragma unroll
  for (int b = 0; b < kCount / 16; ++b)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = b * 16 + (i >> 1) * 8 + (i & 1) * 2;
      p[kFirst + b][i] = ptx::cvt_e4m3x4(s[e], s[e + 1], s[e + 4], s[e + 5]);
    }
}

}  // namespace flashsci::sm90::fp8
