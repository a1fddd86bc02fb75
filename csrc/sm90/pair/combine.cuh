// From partial results of the warps of a CTA, and of the CTAs of a cluster, to results in global
// memory.
#pragma once
#include <cstdint>

#include "../../core/softmax.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/shared.cuh"
#include "load.cuh"

namespace flashsci::sm90::pair {

template <int kDim>
using Sums = float[kQuad][kDim / 8][4];

// Calls each(head, half, d, place) for all pairs of neighbours of a lane, rows g and g + 8, with
// their place in a Partial.
template <int kDim, class Each>
__device__ __forceinline__ void for_places(Partial<kDim>& partial, const Warp& w, Each&& each) {
#pragma unroll
  for (int head = 0; head < kQuad; ++head)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d)
        each(head, half, d,
             reinterpret_cast<float2&>(
                 partial.x[w.quad + head][w.row + half * 8 + w.group][d * 8 + w.lane * 2]));
}

// Adds x of the warps of both halves of the stages' rows; the sum is in the first Partial.
template <class C>
__device__ __forceinline__ void add_halves(Storage<C>& shared, Sums<C::kDim>& x, const Warp& w) {
  if (w.half == 1)
    for_places(shared.partial[1], w, [&](int head, int half, int d, float2& place) {
      place = make_float2(x[head][d][half * 2], x[head][d][half * 2 + 1]);
    });
  __syncthreads();
  if (w.half == 1) return;
  for_places(shared.partial[1], w, [&](int head, int half, int d, float2& place) {
    x[head][d][half * 2] += place.x, x[head][d][half * 2 + 1] += place.y;
  });
  for_places(shared.partial[0], w, [&](int head, int half, int d, float2& place) {
    place = make_float2(x[head][d][half * 2], x[head][d][half * 2 + 1]);
  });
}

// The factor of a part's exponentials for another largest score: they are relative to the rounded
// product (core/softmax.cuh).
__device__ __forceinline__ float weight_of(float own, float maximum) {
  const float offset = __fmul_rn(own, kLog2e), most = __fmul_rn(maximum, kLog2e);
  const bool exact = fabsf(offset) > kExactExponent || fabsf(most) > kExactExponent;
  const float exponent = exact ? (own - maximum) * kLog2e : offset - most;
  return own == -INFINITY ? 0.f : ptx::ex2_approx(exponent);
}

// Calls each(head, row, column, x) for four numbers of a result of this CTA at a time, summed over
// all CTAs of the cluster. weights(head, row, column, size, weight) finds the factors of the CTAs:
// 0 from `size` on.
template <class C, class Weights, class Each>
__device__ __forceinline__ void for_sums(Storage<C>& shared, Weights&& weights, Each&& each) {
  constexpr int kPieces = C::kDim / 4;
  const int rank = ptx::cluster_rank(), size = ptx::cluster_size();
#pragma unroll 1
  for (int i = rank * kThreads + threadIdx.x; i < kHeads * kRows * kPieces; i += size * kThreads) {
    const int column = i % kPieces * 4, row = i / kPieces % kRows, head = i / (kPieces * kRows);
    const uint32_t place = ptx::shared_address(&shared.partial[0].x[head][row][column]);
    // All loads are issued together: a CTA that does not exist repeats the last one, times 0.
    float4 x[kMostCtas], sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int r = 0; r < kMostCtas; ++r)
      x[r] = ptx::ld_cluster_f4(ptx::map_shared(place, min(r, size - 1)));
    float weight[kMostCtas];
    weights(head, row, column, size, weight);
#pragma unroll
    for (int r = 0; r < kMostCtas; ++r) {
      sum.x = fmaf(x[r].x, weight[r], sum.x), sum.y = fmaf(x[r].y, weight[r], sum.y);
      sum.z = fmaf(x[r].z, weight[r], sum.z), sum.w = fmaf(x[r].w, weight[r], sum.w);
    }
    each(head, row, column, sum);
  }
}

// A gradient of rows from `first` on: factor times the sum over the warps of the cluster. All of
// them call it, when the stages are free.
template <class C>
__device__ __forceinline__ void write_gradient(Storage<C>& shared, Sums<C::kDim>& x, const Warp& w,
                                               float factor, float* __restrict__ target,
                                               const FlashsciStrides& strides, int first, int end,
                                               int columns) {
  add_halves(shared, x, w);
  ptx::cluster_sync();
  for_sums(
      shared,
      [&](int, int, int, int size, float (&weight)[kMostCtas]) {
#pragma unroll
        for (int r = 0; r < kMostCtas; ++r) weight[r] = r < size ? factor : 0.f;
      },
      [&](int head, int row, int column, const float4& sum) {
        if (first + row < end && column < columns)
          *reinterpret_cast<float4*>(target + head * strides.head + (first + row) * strides.row +
                                     column) = sum;
      });
  ptx::cluster_sync_relaxed();  // all CTAs have read
}

}  // namespace flashsci::sm90::pair
