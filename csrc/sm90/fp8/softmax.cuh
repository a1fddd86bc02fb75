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

// log2 of P at a row's maximum when its offset is set, first and later, and what a score may be
// before the offset follows: 256 * 2^0.75 = 431. Of the first block's maximum most rows have larger
// scores to come; what outgrew that is seldom outgrown by much.
inline constexpr float kFirstP = FP8_FIRST, kLargestP = 8.f, kLargestExponent = 8.75f;

// The offset at a largest score, rounded down: P of that score is at least 2^largest.
__device__ __forceinline__ float offset_at(float maximum, float factor, float largest) {
  return fmaxf(__fadd_rd(__fmul_rd(maximum, factor), -largest), fwd::kUninitializedMax);
}

// Whether an exponent of the warp is beyond what P may have. Where the offset is at the maximum, it
// is so in rows of large scores alone, whose roundings are.
__device__ __forceinline__ bool outgrows(const float (&maximum)[2], const RowStatistics& rows,
                                         float factor) {
  return __any_sync(0xffffffffu,
                    fmaf(maximum[0], factor, -rows.row_max_log2[0]) > kLargestExponent ||
                        fmaf(maximum[1], factor, -rows.row_max_log2[1]) > kLargestExponent);
}

// Sums of P of a block, of this lane: in chains of few numbers, whose largest bounds P.
struct BlockSums {
  float part[8];  // of 4 columns in turn, and so for 4 more
  __device__ __forceinline__ void add(int e, float x) {
    float& sum = part[e & 7];
    sum = e < 8 ? x : sum + x;
  }
  __device__ __forceinline__ float row(int half) const {
    return (part[2 * half] + part[2 * half + 1]) + (part[2 * half + 4] + part[2 * half + 5]);
  }
  // Whether any P may be beyond its largest. (Of NaN none is: its row is NaN whatever comes.)
  __device__ __forceinline__ bool beyond() const {
    float largest = part[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) largest = fmaxf(largest, part[i]);
    return largest > 430.f;  // below 2^kLargestExponent: no row that the maximum finds is missed
  }
};

// P of S, as operand, per 32 keys: 8 columns of S apart from each other lie in one register
// (transpose.cuh has V in that order). kLimited: exponents are cut at the largest.
template <bool kLimited, int kCount>
__device__ __forceinline__ void exponentials(uint32_t (&p)[kCount / 16][4], BlockSums& sums,
                                             const float (&s)[kCount], const RowStatistics& rows,
                                             float factor) {
#pragma unroll
  for (int b = 0; b < kCount / 16; ++b)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = b * 16 + (i >> 1) * 8 + (i & 1) * 2;
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = e + (j >> 1) * 4 + (j & 1);
        x[j] = fmaf(s[at], factor, -rows.row_max_log2[at >> 1 & 1]);
        x[j] = ptx::ex2_approx(kLimited ? fminf(x[j], kLargestExponent) : x[j]);
        sums.add(at, x[j]);
      }
      p[b][i] = ptx::cvt_e4m3x4(x[0], x[1], x[2], x[3]);
    }
}

// The offsets of rows that outgrew theirs follow the maximum of a block; what was summed before is to
// be multiplied by alpha. The other rows of the warp keep theirs: what becomes of a row depends on no
// other.
__device__ __forceinline__ void follow(const float (&maximum)[2], RowStatistics& rows,
                                       float (&alpha)[2], float factor) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float before = rows.row_max_log2[half], top = quad_max(maximum[half]);
    const bool grew = fmaf(top, factor, -before) > kLargestExponent;
    const float largest = before == fwd::kUninitializedMax ? kFirstP : kLargestP;
    const float next = grew ? fmaxf(before, offset_at(top, factor, largest)) : before;
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

// Of what this lane holds of its two rows, in elements [kBegin, kEnd).
template <int kBegin, int kEnd, int kCount>
__device__ __forceinline__ void part_max(const float (&s)[kCount], float (&maximum)[2]) {
  maximum[0] = s[kBegin], maximum[1] = s[kBegin + 2];
#pragma unroll
  for (int e = kBegin; e < kEnd; e += 4) {
    maximum[0] = fmaxf(maximum[0], fmaxf(s[e], s[e + 1]));
    maximum[1] = fmaxf(maximum[1], fmaxf(s[e + 2], s[e + 3]));
  }
}

// Elements [kBegin, kEnd) of S become P. part: this lane's sums of P, in four chains.
template <int kBegin, int kEnd, int kCount>
__device__ __forceinline__ void exponentials(float (&s)[kCount], float (&part)[4],
                                             const Exponent& exponent) {
#pragma unroll
  for (int e = kBegin; e < kEnd; ++e) {
    s[e] = ptx::ex2_approx(exponent.of(s[e], e));
    part[e & 3] = e < 4 ? s[e] : part[e & 3] + s[e];
  }
}

// P as operand, per 32 keys: 8 columns of S apart from each other lie in one register
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
