// ALiBi: the addend -slope |i + shift - j| of the score of query i and key j, made in registers, and
// the gradient of slopes, -sum_ij dS_ij |i + shift - j|, as sums over keys.
#pragma once
#include <cmath>
#include <cstdint>

#include "../include/flashsci.h"
#include "../include/flashsci_alibi.h"
#include "smem_tile.cuh"
#include "softmax.cuh"

namespace flashsci {

__host__ __device__ __forceinline__ bool has_slopes(const FlashsciBiasMask& p) {
  return p.bias_is_fp32 == FLASHSCI_ALIBI_SLOPES;
}

// The slope of a head. Dense: of its batch entry; packed: of its sequence, 0 for rows of none.
template <class Place>
__device__ __forceinline__ float slope_of(const FlashsciBiasMask& p, const Place& place,
                                          uint32_t head) {
  return __ldg(static_cast<const float*>(p.bias) + place.offset(p.bias_strides, head));
}
__device__ __forceinline__ float slope_of_segment(const FlashsciBiasMask& p, int segment,
                                                  int num_seqs, uint32_t head) {
  if (segment < 1 || segment > num_seqs) return 0.f;
  return __ldg(static_cast<const float*>(p.bias) + (segment - 1) * p.bias_strides.batch0 +
               head * p.bias_strides.head);
}

__device__ __forceinline__ float add_alibi(float s, float slope, float ahead) {
  return fmaf(-slope, fabsf(ahead), s);
}

// s -= slope |i + shift - j|, in the accumulators of mma. slope: in the units of s; ahead: i + shift
// - j of this lane's first score. kInterleaved: see smem_tile.cuh.
template <bool kInterleaved = false, int kM, int kN>
__device__ __forceinline__ void add_alibi(float (&s)[kM][kN][4], float slope, int ahead) {
  const float first = static_cast<float>(ahead);
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) {
    const int m = i / (4 * kN), n = i / 4 % kN, e = i % 4;
    const int further = m * 16 + e / 2 * 8 - key_of_score<kInterleaved>(n, e % 2);
    s[m][n][e] = add_alibi(s[m][n][e], slope, first + static_cast<float>(further));
  }
}

// Adds this lane's part of the sums over keys to the first element of each row of `sums`. ahead: i +
// shift - j of this lane's first score; key_of(n, e): the key of a score, from the first one's on.
template <int kM, int kN, int kBlocks, class KeyOf>
__device__ __forceinline__ void add_slope_sums(float (&sums)[kM][kBlocks][4],
                                               const float (&ds)[kM][kN][4], int ahead,
                                               KeyOf&& key_of) {
  const float first = static_cast<float>(ahead);
#pragma unroll
  for (int i = 0; i < kM * 2; ++i) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < kN * 2; ++j) {
      const float distance = fabsf(first + static_cast<float>(i * 8 - key_of(j / 2, j % 2)));
      sum = fmaf(ds[i / 2][j / 2][i % 2 * 2 + j % 2], distance, sum);
    }
    sums[i / 2][0][i % 2 * 2] -= sum;
  }
}

// Writes them, times `scale`, from the sum of this lane's first row on; `left`: the rows from there.
template <int kM, int kBlocks>
__device__ __forceinline__ void store_slope_sums(const float (&sums)[kM][kBlocks][4], float scale,
                                                 float* to, int left) {
#pragma unroll
  for (int i = 0; i < kM * 2; ++i) {
    const float sum = quad_sum(sums[i / 2][0][i % 2 * 2]);
    if (threadIdx.x % 4 == 0 && i * 8 < left) to[i * 8] = sum * scale;
  }
}

}  // namespace flashsci
