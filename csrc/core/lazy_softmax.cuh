// Online softmax of two rows of accumulators. The offset follows the largest score only when an
// exponent exceeds the threshold; otherwise lanes exchange nothing between two products.
#pragma once
#include <cstdint>

#include "../ptx/math.cuh"
#include "softmax.cuh"

namespace flashsci {

// The offset before a row's first key: so low that the first visible key overflows and is noticed,
// while hidden keys (-inf) still add 0.
inline constexpr float kUninitializedMax = -3e38f;
struct RowStatistics {    // of rows g and g + 8
  float row_max_log2[2];  // P = exp2(exp_scale S - offset); about the largest score so far
  float sum[2];           // this lane's part of the sum of P
};

// An offset for a largest score, rounded down: P of that score is at least 1. Scores of large
// magnitude (masks written as -1e9, scores of 1e8) have roundings that would put P anywhere above
// 1; there the exponent is limited.
__device__ __forceinline__ float offset_at(float maximum, float exp_scale) {
  return __fmul_rd(maximum, exp_scale);
}

// The maximum of this lane's scores in its two rows.
template <int kCount>
__device__ __forceinline__ void lane_max(const float (&s)[kCount], float (&maximum)[2]) {
  maximum[0] = s[0], maximum[1] = s[2];
#pragma unroll
  for (int e = 0; e < kCount; e += 4) {
    maximum[0] = fmaxf(maximum[0], fmaxf(s[e], s[e + 1]));
    maximum[1] = fmaxf(maximum[1], fmaxf(s[e + 2], s[e + 3]));
  }
}

template <int kCount>
__device__ __forceinline__ void row_max(const float (&s)[kCount], float (&maximum)[2]) {
  lane_max(s, maximum);
  maximum[0] = quad_max(maximum[0]);
  maximum[1] = quad_max(maximum[1]);
}

// P of one score. kLimited: its exponent is cut at the threshold. (A limit on P instead of the
// exponent costs registers.)
template <bool kLimited>
__device__ __forceinline__ float exponential(float s, float offset, float exp_scale) {
  const float x = fmaf(s, exp_scale, -offset);
  return ptx::ex2_approx(kLimited ? fminf(x, kRescaleThreshold) : x);
}

// Elements [kBegin, kEnd) of S become P; part: this lane's sums, in four chains.
template <bool kLimited, int kBegin, int kEnd, int kCount>
__device__ __forceinline__ void exponentials(float (&s)[kCount], const float (&offset)[2],
                                             float exp_scale, float (&part)[4]) {
#pragma unroll
  for (int e = kBegin; e < kEnd; ++e) {
    s[e] = exponential<kLimited>(s[e], offset[e >> 1 & 1], exp_scale);
    part[e & 3] = e < 4 ? s[e] : part[e & 3] + s[e];
  }
}

template <bool kLimited, int kCount>
__device__ __forceinline__ void exponentials(float (&s)[kCount], const RowStatistics& rows,
                                             float exp_scale, float (&sum)[2]) {
  float part[4];
  exponentials<kLimited, 0, kCount>(s, rows.row_max_log2, exp_scale, part);
  sum[0] = part[0] + part[1];
  sum[1] = part[2] + part[3];
}

// Whether an exponent of the warp exceeds the threshold. With the offset at the maximum, only rows
// of large scores exceed it.
__device__ __forceinline__ bool exceeds(const float (&maximum)[2], const RowStatistics& rows,
                                        float exp_scale) {
  return __any_sync(0xffffffffu,
                    fmaf(maximum[0], exp_scale, -rows.row_max_log2[0]) > kRescaleThreshold ||
                        fmaf(maximum[1], exp_scale, -rows.row_max_log2[1]) > kRescaleThreshold);
}

// The offsets of a first block, from the largest scores, for which P is at least 1.
template <int kCount>
__device__ __forceinline__ void start_offsets(RowStatistics& rows, const float (&s)[kCount],
                                              float (&maximum)[2], float exp_scale) {
  row_max(s, maximum);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    rows.row_max_log2[half] = fmaxf(offset_at(maximum[half], exp_scale), kUninitializedMax);
}

// The offset of one of the rows follows the largest score, and the sum follows the offset. Returns
// the factor for O.
__device__ __forceinline__ float follow_maximum(RowStatistics& rows, int half, float maximum,
                                                float exp_scale) {
  const float next = fmaxf(rows.row_max_log2[half], offset_at(maximum, exp_scale));
  const float alpha = ptx::ex2_approx(rows.row_max_log2[half] - next);
  rows.row_max_log2[half] = next;
  rows.sum[half] *= alpha;
  return alpha;
}

// The first block of a row: S becomes P.
template <int kCount>
__device__ __forceinline__ void softmax_first(float (&s)[kCount], RowStatistics& rows,
                                              float exp_scale) {
  float maximum[2];
  start_offsets(rows, s, maximum, exp_scale);
  if (exceeds(maximum, rows, exp_scale))
    exponentials<true>(s, rows, exp_scale, rows.sum);
  else
    exponentials<false>(s, rows, exp_scale, rows.sum);
}

// Any later block: S becomes P; returns whether O must be multiplied by alpha.
template <int kCount>
__device__ __forceinline__ bool softmax_next(float (&s)[kCount], RowStatistics& rows,
                                             float (&alpha)[2], float exp_scale) {
  float maximum[2], sum[2];
  lane_max(s, maximum);
  const bool grew = exceeds(maximum, rows, exp_scale);
  if (grew) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      alpha[half] = follow_maximum(rows, half, quad_max(maximum[half]), exp_scale);
    exponentials<true>(s, rows, exp_scale, sum);
  } else {
    exponentials<false>(s, rows, exp_scale, sum);
  }
  rows.sum[0] += sum[0];
  rows.sum[1] += sum[1];
  return grew;
}

}  // namespace flashsci
