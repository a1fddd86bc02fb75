// The sm90 forward exponentiates before it knows a block's maximum; this file repairs overflow.
#pragma once
#include <cstdint>

#include "config.cuh"
#include "softmax.cuh"

namespace flashsci::sm90::fwd {

// P is large against an offset of earlier blocks: everything is reduced by a power of two.
template <int kCount>
__device__ __forceinline__ void follow_growth(float (&p)[kCount], RowStatistics& rows,
                                              float (&sum)[2], float (&alpha)[2]) {
  float maximum[2];
  row_max(p, maximum);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int exponent = min(max((__float_as_int(maximum[half]) >> 23) - 127, 0), 126);
    alpha[half] = __int_as_float((127 - exponent) << 23);
    rows.row_max_log2[half] += static_cast<float>(exponent);
    rows.sum[half] *= alpha[half];
    sum[half] *= alpha[half];
  }
#pragma unroll
  for (int e = 0; e < kCount; ++e) p[e] *= alpha[e >> 1 & 1];
}

// Q K^T of 16 rows and kCount / 2 keys once more, from global memory and by mma: for the rare block
// whose exponentials overflowed, when its tiles may have left shared memory. row: this lane's first
// query row in the sequence. finish(c, n) may change the four scores of keys 8 n .. 8 n + 7.
template <class Op, int kUnrolled, int kCount, class Finish>
__device__ __forceinline__ void recompute_scores(float (&s)[kCount], const ForwardArgs& a,
                                                 const TileInfo& tile, int row, int seq_q,
                                                 int first_key, const Finish& finish) {
  const auto* q = static_cast<const uint16_t*>(a.p.q) +
                  offset_of(a.p.q_strides, tile, tile.head, tile.first_q + row);
  const auto* k = static_cast<const uint16_t*>(a.p.k) +
                  offset_of(a.p.k_strides, tile, tile.head / (a.p.heads_q / a.p.heads_k),
                            tile.first_k + first_key + threadIdx.x % 32 / 4);
  const int rows_left = seq_q - row;
  const auto pair = [&](const uint16_t* from, int column, bool valid) {
    return valid && column < a.p.head_dim ? *reinterpret_cast<const uint32_t*>(from + column) : 0u;
  };
#pragma unroll kUnrolled
  for (int n = 0; n < kCount / 4; ++n, k += 8 * a.p.k_strides.row) {
    float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int d = threadIdx.x % 4 * 2; d < a.p.head_dim; d += 16) {
      const uint16_t* below = q + 8 * a.p.q_strides.row;
      const uint32_t q_pairs[4] = {pair(q, d, rows_left > 0), pair(below, d, rows_left > 8),
                                   pair(q, d + 8, rows_left > 0),
                                   pair(below, d + 8, rows_left > 8)};
      Op::mma(c, q_pairs, pair(k, d, true), pair(k, d + 8, true));
    }
    finish(c, n);
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] = e / 4 == n ? c[e % 4] : s[e];
  }
}

}  // namespace flashsci::sm90::fwd
