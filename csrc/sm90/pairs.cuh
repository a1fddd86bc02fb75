// Bias and mask in the sm90 forward. The producer brings them with K, a box of 64 rows for each
// consumer (of one row where all rows are the same); the consumer adds them to its accumulators.
//
// Shared  Of one consumer and stage: the bias [128 bytes of keys, in turn][64 rows][128 bytes], in
//         128-byte swizzle; the mask [64 rows][64 keys], in 64-byte swizzle.
// Limits  What TMA takes: neighbouring keys are neighbours in memory, all other strides (0 too) are
//         multiples of 16 bytes. The rest stays with sm80 (common/pairs.cuh).
#pragma once
#include <cstdint>

#include "../common/ptx/ldmatrix.cuh"
#include "../common/ptx/shared.cuh"
#include "layout.cuh"

namespace flashsci::sm90 {

// s, in units of the natural exponent once multiplied by `inner`, gets the bias, and -inf where the
// mask hides. Accumulator element e of a lane is row 16 warp + lane / 4 + 8 ((e >> 1) & 1) and key
// 8 (e >> 2) + 2 (lane % 4) + (e & 1); kCount / 2 8-key groups of the block's 64 keys are there.
template <class Op, int kCount>
__device__ __forceinline__ void add_pairs(float (&s)[kCount], const ForwardArgs& a, float inner,
                                          uint32_t bias, uint32_t mask) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  const FlashsciPairs& pairs = a.p.pairs;
  if (pairs.bias != nullptr && pairs.bias_is_fp32) {
    const int row = a.bias_rows == 1 ? 0 : warp_row + lane / 4;  // row + 8 has the same swizzle
    const int below = a.bias_rows == 1 ? 0 : 1024;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {  // 8 keys: a quarter of a box
      const int chunk = n % 4 * 2 + lane % 4 / 2;
      const uint32_t address =
          bias + n / 4 * 8192 + row * 128 + (chunk ^ (row & 7)) * 16 + lane % 2 * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 pair = ptx::ld_shared_f2(address + half * below);
        s[n * 4 + half * 2] = fmaf(s[n * 4 + half * 2], inner, pair.x);
        s[n * 4 + half * 2 + 1] = fmaf(s[n * 4 + half * 2 + 1], inner, pair.y);
      }
    }
  } else if (pairs.bias != nullptr) {
    const int row = a.bias_rows == 1 ? 0 : warp_row + lane % 16;
#pragma unroll
    for (int n = 0; n < kCount / 4; n += 2) {  // 16 keys
      uint32_t words[4];                       // keys 0 .. 7 of rows g and g + 8, keys 8 .. 15
      ptx::ldmatrix_x4(words, bias + row * 128 + ((n + lane / 16) ^ (row & 7)) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& first = s[n * 4 + i * 2];
        float& second = s[n * 4 + i * 2 + 1];
        first = fmaf(first, inner, Op::to_float(static_cast<uint16_t>(words[i] & 0xffff)));
        second = fmaf(second, inner, Op::to_float(static_cast<uint16_t>(words[i] >> 16)));
      }
    }
  }
  if (pairs.mask != nullptr) {
    const int row = a.mask_rows == 1 ? 0 : warp_row + lane / 4;
    const int below = a.mask_rows == 1 ? 0 : 512;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
      const uint32_t address =
          mask + row * 64 + ((n / 2) ^ (row >> 1 & 3)) * 16 + n % 2 * 8 + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t shown = ptx::ld_shared_u16(address + half * below);
        if ((shown & 0xff) == 0) s[n * 4 + half * 2] = -INFINITY;
        if ((shown & 0xff00) == 0) s[n * 4 + half * 2 + 1] = -INFINITY;
      }
    }
  }
}

}  // namespace flashsci::sm90
