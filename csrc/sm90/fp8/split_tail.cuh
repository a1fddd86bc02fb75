// The last tiles of a call, fewer than there are CTAs, cut into pieces: all SMs share a wave that
// would leave most of them idle.
//
// The blocks of keys of these tiles, in a row, are cut into equal runs, one for each CTA, of at
// least one block and shorter than a tile: a run has a piece of a tile, or the end of one and the
// beginning of the next. The sums of a piece go to the workspace. The warp that completes the last
// piece of its rows adds them up, always in the order of the pieces.
#pragma once
#include <cstdint>

#include "../../core/lazy_softmax.cuh"
#include "../../ptx/fence.cuh"
#include "../../ptx/math.cuh"
#include "config.cuh"

namespace flashsci::sm90::fp8 {

// The beginning of a CTA's run, in blocks of all tiles that are cut.
__device__ __forceinline__ uint32_t run_begin(const SplitTail& tail, uint32_t cta) {
  return cta * (tail.tiles * tail.blocks) / gridDim.x;
}
__device__ __forceinline__ uint32_t cta_of(const SplitTail& tail, uint32_t block) {
  return ((block + 1) * gridDim.x - 1) / (tail.tiles * tail.blocks);
}

// The rest of a CTA's run.
struct Run {
  uint32_t block, end;
  __device__ __forceinline__ explicit Run(const SplitTail& tail)
      : block(run_begin(tail, blockIdx.x)), end(run_begin(tail, blockIdx.x + 1)) {}
  __device__ __forceinline__ bool done() const { return block >= end; }
  // The tile of the next piece, and its blocks of keys [first, last).
  __device__ __forceinline__ int take(const SplitTail& tail, int& first, int& last) {
    const uint32_t tile = block / tail.blocks;
    first = static_cast<int>(block - tile * tail.blocks);
    last = static_cast<int>(min(first + end - block, tail.blocks));
    block += last - first;
    return static_cast<int>(tile);
  }
};

// Data of a thread: its part of the output, its offsets and sums; 16 bytes of each lane of the warp
// are neighbours.
template <class C>
inline constexpr int kPieceWords = C::kHeadDimV / 8 + 1;

template <class C>
__device__ __forceinline__ float4* place_of(const SplitTail& tail, uint32_t cta, bool begins,
                                            int warp) {
  const uint32_t piece = (cta * 2 + begins) * (C::kConsumers * 4) + warp;
  return tail.sums + (int64_t{piece} * kPieceWords<C> * 32 + threadIdx.x % 32);
}

// The sums of a warp's rows become those of the whole tile; false: some pieces are not complete
// yet, or another warp has them. warp: among the consumers'.
template <class C>
__device__ __forceinline__ bool gather(float (&o)[C::kHeadDimV / 2], RowStatistics& rows,
                                       const SplitTail& tail, uint32_t tile, bool begins,
                                       int warp) {
  constexpr int kWords = C::kHeadDimV / 8;
  float4* own = place_of<C>(tail, blockIdx.x, begins, warp);
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    own[i * 32] = make_float4(o[i * 4], o[i * 4 + 1], o[i * 4 + 2], o[i * 4 + 3]);
  own[kWords * 32] =
      make_float4(rows.row_max_log2[0], rows.row_max_log2[1], rows.sum[0], rows.sum[1]);
  const uint32_t first = cta_of(tail, tile * tail.blocks);
  const uint32_t last = cta_of(tail, (tile + 1) * tail.blocks - 1);
  __syncwarp();
  uint32_t before = 0;
  if (threadIdx.x % 32 == 0) before = ptx::arrive(tail.arrived + tile * (C::kConsumers * 4) + warp);
  before = __shfl_sync(0xffffffffu, before, 0);
  __syncwarp();
  if (before != last - first) return false;
  float top[2] = {kUninitializedMax, kUninitializedMax};
#pragma unroll 1
  for (uint32_t cta = first; cta <= last; ++cta) {
    const float4 x = __ldcg(place_of<C>(tail, cta, cta == first, warp) + kWords * 32);
    top[0] = fmaxf(top[0], x.x), top[1] = fmaxf(top[1], x.y);
  }
#pragma unroll
  for (int e = 0; e < C::kHeadDimV / 2; ++e) o[e] = 0.f;
  rows.row_max_log2[0] = top[0], rows.row_max_log2[1] = top[1];
  rows.sum[0] = rows.sum[1] = 0.f;
#pragma unroll 1
  for (uint32_t cta = first; cta <= last; ++cta) {
    const float4* piece = place_of<C>(tail, cta, cta == first, warp);
    const float4 x = __ldcg(piece + kWords * 32);
    const float weight[2] = {ptx::ex2_approx(x.x - top[0]), ptx::ex2_approx(x.y - top[1])};
    rows.sum[0] = fmaf(weight[0], x.z, rows.sum[0]);
    rows.sum[1] = fmaf(weight[1], x.w, rows.sum[1]);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float4 y = __ldcg(piece + i * 32);
      o[i * 4] = fmaf(weight[0], y.x, o[i * 4]);
      o[i * 4 + 1] = fmaf(weight[0], y.y, o[i * 4 + 1]);
      o[i * 4 + 2] = fmaf(weight[1], y.z, o[i * 4 + 2]);
      o[i * 4 + 3] = fmaf(weight[1], y.w, o[i * 4 + 3]);
    }
  }
  return true;
}

}  // namespace flashsci::sm90::fp8
