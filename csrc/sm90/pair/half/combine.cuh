// From partial results of the warps of a CTA, and of the CTAs of a cluster, to results in global
// memory: every CTA adds up some heads, which the other CTAs push to it.
#pragma once
#include <cstdint>

#include "../../../ptx/cluster.cuh"
#include "../../../ptx/mbarrier.cuh"
#include "../../../ptx/shared.cuh"
#include "../../../ptx/warpgroup.cuh"
#include "lane_map.cuh"

namespace flashsci::sm90::pair::half {

// A lane's data of some heads, 16 bytes of rows g and g + 8 each.
template <int kHeadCount, int kPieces>
using Pieces = float[kHeadCount][kPieces][4];

inline constexpr int kPieceBytes = 32 * 16;  // of all lanes

__device__ __forceinline__ void store_piece(uint32_t place, const float (&x)[4]) {
  ptx::st_shared(place, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]),
                                   __float_as_uint(x[2]), __float_as_uint(x[3])));
}
__device__ __forceinline__ void load_piece(float (&x)[4], uint32_t place) {
  const uint4 v = ptx::ld_shared_v4(place);
  x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y);
  x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
}

// Two warps that differ only in their half of the stages' rows: each gives the other its sums of
// two heads, and keeps the sum of both for the other two. `memory`: of stages, when all blocks are
// done.
template <int kPieces>
__device__ __forceinline__ void exchange_halves(Pieces<kQuad / 2, kPieces>& ours,
                                                Pieces<kQuad / 2, kPieces>& theirs,
                                                const Pieces<kQuad, kPieces>& x, uint32_t memory,
                                                const Warp& w) {
  constexpr int kCount = kQuad / 2, kBytes = kCount * kPieces * kPieceBytes;
  const uint32_t place = memory + threadIdx.x % 32 * 16;
  ptx::barrier_sync(1, kThreads);
#pragma unroll
  for (int i = 0; i < kCount * kPieces; ++i) {
    float given[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float low = x[i / kPieces][i % kPieces][e];
      const float high = x[kCount + i / kPieces][i % kPieces][e];
      given[e] = w.half == 0 ? high : low;
      ours[i / kPieces][i % kPieces][e] = w.half == 0 ? low : high;
    }
    store_piece(place + (w.warp ^ 4) * kBytes + i * kPieceBytes, given);
  }
  ptx::barrier_sync(1, kThreads);
#pragma unroll
  for (int i = 0; i < kCount * kPieces; ++i)
    load_piece(theirs[i / kPieces][i % kPieces], place + w.warp * kBytes + i * kPieceBytes);
}

// The owners of sums: CTA r adds up kHeads / size heads, from r kHeads / size on.
template <class C>
struct Exchange {
  static constexpr int kTiles = kRows / kWarpRows;
  static_assert(C::kPartBytes == kHeads * kTiles * C::kPieces * kPieceBytes, "what is pushed");
  Storage<C>& shared;
  const int rank = ptx::cluster_rank(), size = ptx::cluster_size();
  const int heads = kHeads >> size / 2;  // size: 1, 2 or 4

  // The address of a warp's sums of the two heads that it has kept.
  template <int kPieces>
  __device__ __forceinline__ void push(const Pieces<kQuad / 2, kPieces>& x, const Warp& w) const {
    const uint32_t summed = ptx::shared_address(&shared.summed);
#pragma unroll
    for (int i = 0; i < kQuad / 2; ++i) {
      const int head = w.quad + w.half * (kQuad / 2) + i, owner = head * size / kHeads;
      const uint32_t own = part<kPieces>(rank, head - owner * heads, w.row / kWarpRows);
      const uint32_t target = ptx::map_shared(own + threadIdx.x % 32 * 16, owner);
      const uint32_t barrier = ptx::map_shared(summed, owner);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        ptx::push(target + piece * kPieceBytes, x[i][piece], barrier);
    }
  }
  // Calls each(head, row, load) for rows of this CTA's heads, when all CTAs have pushed theirs:
  // load(r, piece) gives two neighbours of a row from CTA r's part of a piece. CTAs that do not
  // exist repeat the last one, so that all loads are issued together.
  template <int kPieces, class Each>
  __device__ __forceinline__ void for_rows(const Warp& w, Each&& each) const {
    ptx::mbarrier_wait(ptx::shared_address(&shared.summed), 0);
#pragma unroll 1
    for (int i = w.warp; i < heads * kTiles * 2; i += kWarps) {
      const int lower = i % 2, tile = i / 2 % kTiles, head = i / (2 * kTiles);
      each(rank * heads + head, tile * kWarpRows + lower * 8 + w.group, [&](int r, int piece) {
        return ptx::ld_shared_f2(part<kPieces>(min(r, size - 1), head, tile) +
                                 threadIdx.x % 32 * 16 + lower * 8 + piece * kPieceBytes);
      });
    }
  }

 private:
  template <int kPieces>
  __device__ __forceinline__ uint32_t part(int r, int head, int tile) const {
    return ptx::shared_address(shared.parts) +
           ((r * heads + head) * kTiles + tile) * kPieces * kPieceBytes;
  }
};

}  // namespace flashsci::sm90::pair::half
