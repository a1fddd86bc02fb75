// V transposed in shared memory: wgmma takes 8-bit operands with the summed dim innermost, and V
// has its keys outermost.
//
// ldmatrix moves 8 x 8 pairs of bytes: read transposed, matrix X of keys 0 .. 7 and 16 columns
// gives lane 4 g + t the bytes (key 2 t, columns 2 g, 2 g + 1), (key 2 t + 1, columns 2 g, 2 g +
// 1), and Y of keys 8 .. 15 the same 8 keys on. One byte permutation takes column 2 g out of both,
// another column 2 g + 1: four bytes of a row of the transposed tile, of keys 2 t, 2 t + 1, 8 + 2
// t, 9 + 2 t. A lane has P in the same order: byte e of its A operand is the score of column 8 (e
// >> 1) + 2 t + (e & 1) of every 16 (ptx/qgmma.cuh). So slot 4 t + e of a row of V^T holds that
// key.
//
// After the rows of V^T there are 8 more, of ones and zeros: their columns of the product with P
// are the sums of P.
//
// stmatrix writes 8 rows at a time; in swizzled tiles rows of the same parity have bank conflicts.
// So the matrix of the even columns takes the odd ones for g >= 4, and the other way round.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../ptx/fence.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "load.cuh"

namespace flashsci::sm90::fp8 {

// TMA's swizzle: the index of 16 bytes in a row of kSpan bytes is XORed with this.
template <int kSpan>
__device__ __forceinline__ constexpr int swizzle_of(int row) {
  return kSpan == 128 ? row & 7 : row >> 1 & 3;
}

// The columns of a block are shared by its parts, and those of a part by the warps.
template <class C>
inline constexpr int kShares = C::kTransposers * C::kVParts;

// One share of the columns. Stages are aligned to the 8 rows of the swizzle's pattern (Tiling), so
// that a lane's offset is XORed into their addresses: except for a group's own bits it is the same
// for all stages.
template <class C>
__device__ __forceinline__ void turn_tile(uint32_t v, uint32_t turned, int share) {
  constexpr int kSpan = C::kSpanV, kSpanTurned = C::kBlockK;
  constexpr int kGroups = C::kHeadDimV / 16 / kShares<C>;  // of 16 columns
  constexpr int kParts = C::kBlockK / 32;                  // of 32 keys
  constexpr int kBoxGroups = kSpan / 16;
  constexpr int kAtOnce = C::kFast || kParts < 4 ? 2 : 4;  // registers
  static_assert(kParts % 2 == 0 && (kGroups % kBoxGroups == 0 || kBoxGroups % kGroups == 0));
  const int lane = threadIdx.x % 32, matrix = lane / 8, r = lane % 8;
  const int group0 = share * kGroups;  // its bits below kGroups are zero
  const uint32_t source = v + group0 / kBoxGroups * (C::kBlockK * kSpan) +
                          (matrix * 8 + r) * kSpan +
                          (group0 % kBoxGroups ^ swizzle_of<kSpan>(r)) * 16;
  const int row = 2 * r + ((r >> 2) ^ (matrix & 1));
  const uint32_t target = turned + (group0 * 16 + row) * kSpanTurned +
                          ((matrix >> 1) ^ swizzle_of<kSpanTurned>(row)) * 16;
  const uint32_t even = lane < 16 ? 0x6420 : 0x7531, odd = lane < 16 ? 0x7531 : 0x6420;
#pragma unroll 1
  for (int g = 0; g < kGroups; ++g) {
    const uint32_t from = (source ^ g % kBoxGroups * 16) + g / kBoxGroups * (C::kBlockK * kSpan);
    const uint32_t to = target + g * 16 * kSpanTurned;
#pragma unroll
    for (int n = 0; n < kParts; n += kAtOnce) {
      uint32_t x[kAtOnce][4];  // all loads come before the first store, which would wait for each
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) ptx::ldmatrix_x4_trans(x[i], from + (n + i) * 32 * kSpan);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        ptx::stmatrix_x4(to ^ (n + i) * 32, __byte_perm(x[i][0], x[i][1], even),
                         __byte_perm(x[i][0], x[i][1], odd), __byte_perm(x[i][2], x[i][3], even),
                         __byte_perm(x[i][2], x[i][3], odd));
    }
  }
}

// A mask of 16 slots: the bytes of word t whose keys are among the first `keys`.
__device__ __forceinline__ constexpr uint32_t bytes_before(int t, int keys) {
  uint32_t mask = 0;
  for (int e = 0; e < 4; ++e)
    if (2 * t + (e >> 1) * 8 + (e & 1) < keys) mask |= 0xffu << 8 * e;
  return mask;
}

// Zeros for keys from `keys` on, in the tile that this warp has transposed: P is 0 there, but 0
// times a neighbour's NaN is NaN. This is rare and so a separate pass.
template <class C>
__device__ __forceinline__ void cut_tile(uint32_t turned, int share, int keys) {
  constexpr int kRows = C::kHeadDimV / kShares<C>;
  __syncwarp();
#pragma unroll 1
  for (int row = share * kRows + threadIdx.x % 32; row < (share + 1) * kRows; row += 32)
#pragma unroll 1
    for (int chunk = keys / 16; chunk < C::kBlockK / 16; ++chunk) {
      const uint32_t at = turned + row * C::kBlockK + (chunk ^ swizzle_of<C::kBlockK>(row)) * 16;
      const int left = keys - chunk * 16;
      uint4 words = ptx::ld_shared_v4(at);
      words.x &= bytes_before(0, left), words.y &= bytes_before(1, left);
      words.z &= bytes_before(2, left), words.w &= bytes_before(3, left);
      ptx::st_shared(at, words);
    }
}

// Writes the rows after those of V, in every stage, once: nothing overwrites them. Their fence and
// arrivals are those of each stage's first tile.
template <class C>
__device__ __forceinline__ void write_ones(Storage<C>& shared, int warp) {
  constexpr int kRow = C::kBlockK / 16;  // in units of 16 bytes; uniform rows need no swizzle
  for (int i = warp * 32 + threadIdx.x % 32; i < C::kStages * 8 * kRow; i += C::kTransposers * 32) {
    const int stage = i / (8 * kRow), unit = i % (8 * kRow);
    const uint32_t x = unit < kRow ? 0x38383838 : 0;  // 1 in e4m3
    ptx::st_shared(ptx::shared_address(shared.v_turned[stage]) + C::kVBytes + unit * 16,
                   make_uint4(x, x, x, x));
  }
}

// Transposes V of the published tiles. Run by one of kTransposers warps.
template <class C, bool kVarlen>
__device__ __forceinline__ void turn_v(Storage<C>& shared, const Args& a, int warp) {
  const auto address = [](const void* x) { return ptx::shared_address(x); };
  const bool first_lane = threadIdx.x % 32 == 0;
  uint32_t turn = 0;
  write_ones(shared, warp);
#pragma unroll 1
  for (uint32_t tiles = 0;; ++tiles) {
    ptx::mbarrier_sleep(address(&shared.tile_ready[tiles % kTileSlots]), tiles / kTileSlots & 1);
    const TileInfo& tile = shared.tile_info[tiles % kTileSlots];
    if (tile.row < 0) break;
    const int seq_q = kVarlen ? tile.seq_q : a.p.seq_q, seq_k = kVarlen ? tile.seq_k : a.p.seq_k;
    const auto blocks = blocks_of<C, kVarlen>(fwd::window_of(a.p, seq_q, seq_k), tile.row,
                                              C::kBlockQ, seq_q, tile.first_block, tile.end_block);
#pragma unroll 1
    for (int block = blocks.end - 1; block >= blocks.first; --block, ++turn) {
      const uint32_t stage = turn % C::kStages, phase = turn / C::kStages & 1;
      const uint32_t v_stage = turn % C::kVStages, v_phase = turn / C::kVStages & 1;
      const uint32_t v = address(shared.v[v_stage]), turned = address(shared.v_turned[stage]);
      const int keys = seq_k - block * C::kBlockK;
#pragma unroll
      for (int part = 0; part < C::kVParts; ++part) {
        const int share = part * C::kTransposers + warp;
        ptx::mbarrier_sleep(address(&shared.v_full[v_stage][part]), v_phase);
        if (part == 0) ptx::mbarrier_sleep(address(&shared.turned_empty[stage]), phase ^ 1);
        constexpr int kBytes = C::kVBytes / kShares<C>;
        poison_warp(turned + share * kBytes, kBytes);
        turn_tile<C>(v, turned, share);
        if (kVarlen && keys < C::kBlockK) cut_tile<C>(turned, share, keys);
        const bool last = part + 1 == C::kVParts;
        if (last) ptx::fence_proxy_async();
        __syncwarp();
        if (first_lane) {
          if (last) ptx::mbarrier_arrive(address(&shared.turned_full[stage]));
          ptx::mbarrier_arrive(address(&shared.v_empty[v_stage][part]));
        }
      }
    }
    __syncwarp();  // without blocks no other __syncwarp followed the reads of the published record
    if (first_lane) ptx::mbarrier_arrive(address(&shared.q_empty[tiles % C::kQStages][0]));
  }
}

}  // namespace flashsci::sm90::fp8
