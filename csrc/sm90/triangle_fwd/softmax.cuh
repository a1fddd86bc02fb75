// From a block of scores to P: without a search for their maximum if rows have seen keys, since it
// hardly moves, and carefully if the sums show that a score has grown too much. The rules are those
// of fwd/softmax.cuh; but the scores stay in registers, so that nothing is computed again.
#pragma once
#include <cstdint>

#include "../fwd/softmax.cuh"

namespace flashsci::sm90::triangle_fwd {

// P = exp2(exp_scale S - offset), packed as operand of P V. sum: this lane's part for its two rows,
// before rounding. kLimited: as in core/lazy_softmax.cuh.
template <class Op, bool kLimited, int kCount>
__device__ __forceinline__ void exponentials(uint32_t (&p)[kCount / 8][4], const float (&s)[kCount],
                                             const RowStatistics& rows, float exp_scale,
                                             float (&sum)[2]) {
  float part[4];
#pragma unroll
  for (int e = 0; e < kCount; e += 2) {
    float pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pair[i] = exponential<kLimited>(s[e + i], rows.row_max_log2[e >> 1 & 1], exp_scale);
      float& chain = part[(e & 2) + i];
      chain = e < 4 ? pair[i] : chain + pair[i];
    }
    p[e / 8][e / 2 % 4] = Op::pack2(pair[0], pair[1]);
  }
  sum[0] = part[0] + part[1];
  sum[1] = part[2] + part[3];
}

// Whether P is too large for fp16, or overflowed, in any row of the warp.
__device__ __forceinline__ bool overflows(const float (&sum)[2]) {
  return __any_sync(0xffffffffu, fmaxf(sum[0], sum[1]) > fwd::kOverflow);
}

// The offset follows the maximum; sums and output are rescaled. If scores are so large that the
// roundings of the offset overflow, exponents are limited.
template <class Op, int kCount, int kOutputs>
__device__ __forceinline__ void softmax_carefully(uint32_t (&p)[kCount / 8][4],
                                                  const float (&s)[kCount], float (&o)[kOutputs],
                                                  RowStatistics& rows, float exp_scale) {
  float maximum[2], sum[2];
  row_max(s, maximum);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float alpha = follow_maximum(rows, half, maximum[half], exp_scale);
#pragma unroll
    for (int e = 2 * half; e < kOutputs; e += 4) {
      o[e] *= alpha;
      o[e + 1] *= alpha;
    }
  }
  exponentials<Op, true>(p, s, rows, exp_scale, sum);
  rows.sum[0] += sum[0];
  rows.sum[1] += sum[1];
}

}  // namespace flashsci::sm90::triangle_fwd
