// From what each warp has of the rows of a CTA, and each CTA of a cluster, to results in memory.
#pragma once
#include <cstdint>

#include "../../core/softmax.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/cp_async.cuh"
#include "load.cuh"

namespace flashsci::sm90::pair {

template <class C>
using Sums = float[kQuad][C::kDim / 8][4];

// Calls each(x, place) for all pairs of neighbours that a lane has, with their place in a Partial.
template <class C, class Each>
__device__ __forceinline__ void for_places(Partial<C>& partial, const Warp<C>& w, Each&& each) {
#pragma unroll
  for (int head = 0; head < kQuad; ++head)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int d = 0; d < C::kDim / 8; ++d)
        each(head, half, d,
             reinterpret_cast<float2&>(
                 partial.x[w.quad * kQuad + head][w.row + half * 8 + w.group][d * 8 + w.lane * 2]));
}

// x of the warps of one split each becomes their sum, in the first Partial.
template <class C>
__device__ __forceinline__ void add_splits(Storage<C>& shared, Sums<C>& x, const Warp<C>& w) {
  if (w.split > 0)
    for_places<C>(shared.partial[w.split], w, [&](int head, int half, int d, float2& place) {
      place = make_float2(x[head][d][half * 2], x[head][d][half * 2 + 1]);
    });
  __syncthreads();
  if (w.split > 0) return;
#pragma unroll 1
  for (int split = 1; split < C::kSplits; ++split)
    for_places<C>(shared.partial[split], w, [&](int head, int half, int d, float2& place) {
      x[head][d][half * 2] += place.x, x[head][d][half * 2 + 1] += place.y;
    });
  for_places<C>(shared.partial[0], w, [&](int head, int half, int d, float2& place) {
    place = make_float2(x[head][d][half * 2], x[head][d][half * 2 + 1]);
  });
}

// What the exponents of a part are relative to, and what another largest score makes of them. It is
// the product as it was rounded (core/softmax.cuh).
__device__ __forceinline__ float weight_of(float own, float maximum) {
  const float offset = __fmul_rn(own, kLog2e), most = __fmul_rn(maximum, kLog2e);
  const bool exact = fabsf(offset) > kExactExponent || fabsf(most) > kExactExponent;
  const float exponent = exact ? (own - maximum) * kLog2e : offset - most;
  return own == -INFINITY ? 0.f : ptx::ex2_approx(exponent);
}

// Calls each(head, row, column, x) for 16 bytes of a result at a time, those of this CTA, with what
// all CTAs of the cluster have of it; weights(head, row, column, size, weight)
// finds what to multiply theirs by: 0 from `size` on.
template <class C, class Weights, class Each>
__device__ __forceinline__ void for_sums(Storage<C>& shared, Weights&& weights, Each&& each) {
  using F = typename C::Format;
  constexpr int kChunks = F::kDim / F::kElements;
  const int rank = ptx::cluster_rank(), size = ptx::cluster_size();
#pragma unroll 1
  for (int i = rank * kThreads + threadIdx.x; i < C::kHeads * kRows * kChunks;
       i += size * kThreads) {
    const int column = i % kChunks * F::kElements, row = i / kChunks % kRows;
    const int head = i / (kChunks * kRows);
    float weight[kMostCtas], sum[F::kElements] = {};
    const uint32_t place = ptx::shared_address(&shared.partial[0].x[head][row][column]);
    // All loads at a time: of a CTA that there is not, once more of the last, times 0.
    float4 x[kMostCtas][F::kElements / 4];
#pragma unroll
    for (int r = 0; r < kMostCtas; ++r) {
      const uint32_t theirs = ptx::map_shared(place, min(r, size - 1));
#pragma unroll
      for (int e = 0; e < F::kElements / 4; ++e) x[r][e] = ptx::ld_cluster_f4(theirs + e * 16);
    }
    weights(head, row, column, size, weight);
#pragma unroll
    for (int r = 0; r < kMostCtas; ++r) {
#pragma unroll
      for (int e = 0; e < F::kElements / 4; ++e) {
        sum[e * 4] = fmaf(x[r][e].x, weight[r], sum[e * 4]);
        sum[e * 4 + 1] = fmaf(x[r][e].y, weight[r], sum[e * 4 + 1]);
        sum[e * 4 + 2] = fmaf(x[r][e].z, weight[r], sum[e * 4 + 2]);
        sum[e * 4 + 3] = fmaf(x[r][e].w, weight[r], sum[e * 4 + 3]);
      }
    }
    each(head, row, column, sum);
  }
}

// A gradient of rows from `first` on, factor times what the warps of the cluster have of it. All
// warps of it come here, with the stages free.
template <class C>
__device__ __forceinline__ void write_gradient(Storage<C>& shared, Sums<C>& x, const Warp<C>& w,
                                               float factor,
                                               typename C::Format::Element* __restrict__ target,
                                               const FlashsciStrides& strides, int first, int end,
                                               int columns) {
  add_splits<C>(shared, x, w);
  ptx::cluster_sync();
  for_sums<C>(
      shared,
      [&](int, int, int, int size, float (&weight)[kMostCtas]) {
#pragma unroll
        for (int r = 0; r < kMostCtas; ++r) weight[r] = r < size ? factor : 0.f;
      },
      [&](int head, int row, int column, const auto& sum) {
        if (first + row < end && column < columns)
          C::Format::store(target + head * strides.head + (first + row) * strides.row + column,
                           sum);
      });
  ptx::cluster_sync_relaxed();  // everybody has read
}

}  // namespace flashsci::sm90::pair
