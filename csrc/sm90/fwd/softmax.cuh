// Score operations of a consumer of the sm90 forward, in addition to core/lazy_softmax.cuh: masks,
// and limits.
#pragma once
#include <cstdint>

#include "../../core/lazy_softmax.cuh"
#include "../../core/mask.cuh"
#include "config.cuh"

namespace flashsci::sm90::fwd {

// Accumulator element e of a lane is row 16 warp + lane / 4 + 8 ((e >> 1) & 1) of the warpgroup's
// 64 and column 8 (e >> 2) + 2 (lane % 4) + (e & 1).

// Scores of keys outside [begin(i), end(i)) become -inf. row: this lane's first query row; column:
// the key of its first score. Accumulator elements [kBegin, kEnd).
template <int kBegin, int kEnd, bool kLeft, int kCount>
__device__ __forceinline__ void mask_scores(float (&s)[kCount], const Window& window, int row,
                                            int column) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int limit = (kLeft ? window.begin(row + 8 * half) : window.end(row + 8 * half)) - column;
#pragma unroll
    for (int e = kBegin + 2 * half; e < kEnd; e += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = e / 4 * 8 + i;
        if (kLeft ? j < limit : j >= limit) s[e + i] = -INFINITY;
      }
    }
  }
}

// The limit of a lane's sum of one block, beyond which the offset must follow: P stays inside fp16.
inline constexpr float kOverflow = 32768.f;
// The limit from which P is computed again: it has overflowed, or its offset is so large that it
// cannot follow by small steps.
inline constexpr float kRecomputeAbove = 1 << 26;

}  // namespace flashsci::sm90::fwd
