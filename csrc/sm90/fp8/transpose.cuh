// V turned in shared memory: wgmma takes 8-bit operands with their sum innermost, and V has its
// keys outermost.
//
// ldmatrix moves 8 x 8 pairs of bytes: read transposed, matrix X of keys 0 .. 7 and 16 columns gives
// lane 4 g + t the bytes (key 2 t, columns 2 g, 2 g + 1), (key 2 t + 1, columns 2 g, 2 g + 1), and Y
// of keys 8 .. 15 the same 8 keys on. One byte permutation takes column 2 g out of both, another
// column 2 g + 1: four bytes of a row of the turned tile, of keys 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t.
// That is the order in which a lane has P: byte e of its A operand is the score of column 8 (e >> 1)
// + 2 t + (e & 1) of every 16 (ptx/qgmma.cuh). So slot 4 t + e of a row of V^T holds that key.
//
// stmatrix writes 8 rows at a time; in swizzled tiles they collide where they have the same parity.
// So the matrix of the even columns takes the odd ones for g >= 4, and the other way round.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/stmatrix.cuh"
#include "../../ptx/tma.cuh"
#include "load.cuh"

namespace flashsci::sm90::fp8 {

// Which 16 bytes of a row of kSpan bytes, in units of 16 bytes, XOR by this: TMA's swizzle.
template <int kSpan>
__device__ __forceinline__ constexpr int swizzle_of(int row) {
  return kSpan == 128 ? row & 7 : row >> 1 & 3;
}

// The bytes of a word, slots 4 t .. of 16 keys, whose keys are before `keys` of these 16.
__device__ __forceinline__ uint32_t bytes_before(int keys) {
  const int first = threadIdx.x % 4 * 2;
  uint32_t mask = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (first + (e >> 1) * 8 + (e & 1) < keys) mask |= 0xffu << 8 * e;
  return mask;
}

// The columns of one of kTransposers warps. kCut: keys from `keys` on become zeros; P is 0 there, but
// 0 times a neighbour's NaN is not.
template <class C, bool kCut>
__device__ __forceinline__ void turn_tile(uint32_t v, uint32_t turned, int warp, int keys) {
  constexpr int kSpan = C::kSpanV, kSpanTurned = C::kBlockK;
  constexpr int kGroups = C::kHeadDimV / 16 / C::kTransposers;  // of 16 columns
  const int lane = threadIdx.x % 32, matrix = lane / 8, r = lane % 8;
  const int swizzle = swizzle_of<kSpan>(r);
  const uint32_t source = v + (matrix * 8 + r) * kSpan;
  const int row = 2 * r + ((r >> 2) ^ (matrix & 1));
  const uint32_t target =
      turned + row * kSpanTurned + ((matrix >> 1) ^ swizzle_of<kSpanTurned>(row)) * 16;
  const uint32_t even = lane < 16 ? 0x6420 : 0x7531, odd = lane < 16 ? 0x7531 : 0x6420;
#pragma unroll 1
  for (int i = 0; i < kGroups; ++i) {
    const int group = warp * kGroups + i;
    const uint32_t from = source + group / (kSpan / 16) * (C::kBlockK * kSpan) +
                          (group % (kSpan / 16) ^ swizzle) * 16;
    const uint32_t to = target + group * 16 * kSpanTurned;
#pragma unroll
    for (int n = 0; n < C::kBlockK / 32; ++n) {  // 32 keys
      uint32_t x[4];
      ptx::ldmatrix_x4_trans(x, from + n * 32 * kSpan);
      uint32_t y[4] = {__byte_perm(x[0], x[1], even), __byte_perm(x[0], x[1], odd),
                       __byte_perm(x[2], x[3], even), __byte_perm(x[2], x[3], odd)};
      if constexpr (kCut) {
        const uint32_t first = bytes_before(keys - n * 32),
                       second = bytes_before(keys - n * 32 - 16);
        y[0] &= first, y[1] &= first, y[2] &= second, y[3] &= second;
      }
      ptx::stmatrix_x4(to ^ n * 32, y[0], y[1], y[2], y[3]);
    }
  }
}

// Turns V of the published tiles. One of kTransposers warps.
template <class C, bool kVarlen>
__device__ __forceinline__ void turn_v(Storage<C>& shared, const Args& a, int warp) {
  const auto address = [](const void* x) { return ptx::shared_address(x); };
  const bool first_lane = threadIdx.x % 32 == 0;
  uint32_t turn = 0;
#pragma unroll 1
  for (uint32_t tiles = 0;; ++tiles) {
    ptx::mbarrier_sleep(address(&shared.tile_ready[tiles % kTileSlots]), tiles / kTileSlots & 1);
    const TileInfo& tile = shared.tile_info[tiles % kTileSlots];
    if (tile.row < 0) break;
    const int seq_q = kVarlen ? tile.seq_q : a.p.seq_q, seq_k = kVarlen ? tile.seq_k : a.p.seq_k;
    const Blocks<C> blocks(fwd::window_of(a.p, seq_q, seq_k), tile.row, C::kBlockQ, seq_q);
#pragma unroll 1
    for (int block = blocks.end - 1; block >= blocks.first; --block, ++turn) {
      const uint32_t stage = turn % C::kStages, phase = turn / C::kStages & 1;
      const uint32_t v = address(shared.v[stage]), turned = address(shared.v_turned[stage]);
      const int keys = seq_k - block * C::kBlockK;
      ptx::mbarrier_sleep(address(&shared.v_full[stage]), phase);
      ptx::mbarrier_sleep(address(&shared.turned_empty[stage]), phase ^ 1);
      constexpr int kBytes = C::kVBytes / C::kTransposers;
      poison_warp(turned + warp * kBytes, kBytes);
      if (kVarlen && keys < C::kBlockK)
        turn_tile<C, true>(v, turned, warp, keys);
      else
        turn_tile<C, false>(v, turned, warp, keys);
      ptx::fence_proxy_async();
      __syncwarp();
      if (first_lane) {
        ptx::mbarrier_arrive(address(&shared.turned_full[stage]));
        ptx::mbarrier_arrive(address(&shared.v_empty[stage]));
      }
    }
    if (first_lane) ptx::mbarrier_arrive(address(&shared.q_empty[tiles % C::kQStages][0]));
  }
}

}  // namespace flashsci::sm90::fp8
