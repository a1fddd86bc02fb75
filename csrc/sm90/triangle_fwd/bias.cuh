// The initial value of a block of scores: the bias in units of q.k, from shared memory.
#pragma once
#include <cstdint>

#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../fwd/bias_mask.cuh"
#include "config.cuh"

namespace flashsci::sm90::triangle_fwd {

// s: element e of a lane is row 16 warp + lane / 4 + 8 ((e >> 1) & 1) of 64 and key 8 (e >> 2) + 2
// (lane % 4) + (e & 1). tile: of these rows, as TMA writes it.
template <class Op, class C>
__device__ __forceinline__ void read_bias(float (&s)[C::kBlockK / 2], uint32_t tile, float factor) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  if constexpr (C::kBiasBytes == 4) {
    // The row 8 further down has the same swizzle.
    const uint32_t start =
        tile + fwd::swizzled<32>(warp_row + lane / 4, lane % 4 / 2) + lane % 2 * 8;
#pragma unroll
    for (int e = 0; e < C::kBlockK / 2; e += 2) {
      const float2 pair = ptx::ld_shared_f2(start + e / 4 * C::BiasBox::kBytes + e / 2 % 2 * 256);
      s[e] = pair.x * factor;
      s[e + 1] = pair.y * factor;
    }
  } else {
    // The address of the first chunk; the swizzle of chunk n + i is that of n, XOR 16 i.
    const uint32_t start = tile + fwd::swizzled<128>(warp_row + lane % 16, lane / 16);
#pragma unroll
    for (int n = 0; n < C::kBlockK / 8; n += 2) {  // 16 keys
      uint32_t four[4];                            // keys 0 .. 7 of rows g and g + 8, keys 8 .. 15
      ptx::ldmatrix_x4(four, start ^ (n * 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n * 4 + i * 2] = Op::to_float(static_cast<uint16_t>(four[i] & 0xffff)) * factor;
        s[n * 4 + i * 2 + 1] = Op::to_float(static_cast<uint16_t>(four[i] >> 16)) * factor;
      }
    }
  }
}

// A resident bias is divided by the scale once for all units, in place: each lane's four numbers of
// every 8 keys are neighbours then.
inline constexpr int kPreparedStep = 64 * 8 * 4;  // from 8 keys to the next

__device__ __forceinline__ uint32_t prepared_start(uint32_t stage) {
  return stage + threadIdx.x % 128 * 16;
}

// Called by a warpgroup. barrier: its own hardware barrier.
template <class Op, class C>
__device__ __forceinline__ void prepare_bias(uint32_t stage, float factor, int barrier) {
  float s[C::kBlockK / 2];
  read_bias<Op, C>(s, stage + C::kBiasStart, factor);
  if constexpr (C::kBiasBytes == 4)
    __syncwarp();  // 8 keys of a warp's 16 rows are 512 bytes in both layouts
  else
    ptx::barrier_sync(barrier, 128);
  const uint32_t start = prepared_start(stage);
#pragma unroll
  for (int e = 0; e < C::kBlockK / 2; e += 4)
    ptx::st_shared(start + e / 4 * kPreparedStep,
                   make_uint4(__float_as_uint(s[e]), __float_as_uint(s[e + 1]),
                              __float_as_uint(s[e + 2]), __float_as_uint(s[e + 3])));
}

template <class C>
__device__ __forceinline__ void read_prepared_bias(float (&s)[C::kBlockK / 2], uint32_t stage) {
  const uint32_t start = prepared_start(stage);
#pragma unroll
  for (int e = 0; e < C::kBlockK / 2; e += 4) {
    const uint4 four = ptx::ld_shared_v4(start + e / 4 * kPreparedStep);
    s[e] = __uint_as_float(four.x), s[e + 1] = __uint_as_float(four.y);
    s[e + 2] = __uint_as_float(four.z), s[e + 3] = __uint_as_float(four.w);
  }
}

// Keys that a member does not see become -inf. shown: a bit for each of the 64 keys.
template <int kCount>
__device__ __forceinline__ void hide_keys(float (&s)[kCount], const uint32_t (&shown)[2]) {
  const int shift = threadIdx.x % 4 * 2;
  const uint32_t mine[2] = {shown[0] >> shift, shown[1] >> shift};
#pragma unroll
  for (int e = 0; e < kCount; ++e)
    if ((mine[e / 16] & 1u << (e / 4 % 4 * 8 + e % 2)) == 0) s[e] = -INFINITY;
}

}  // namespace flashsci::sm90::triangle_fwd
