// A consumer's part of its owner's bias and of the gradient of that: elements that stay in one
// lane, in the layout of S^T, through all members.
#pragma once
#include <cstdint>

#include "../../core/smem_tile.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/shared.cuh"
#include "config.cuh"

namespace flashsci::sm90::triangle_bwd {

// Element e of a lane in a step is key 16 warp + lane / 4 + 8 ((e >> 1) & 1) of the CTA's 64 and
// query 8 (e >> 2) + 2 (lane % 4) + (e & 1) of the block. Calls move(e, query, key) for the
// elements of eight columns n that are in the tensor.
template <class Move>
__device__ __forceinline__ void for_elements(const TriangleArgs& a, const Work& work,
                                             uint32_t block, int n, const Move& move) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int query = block * kBlock + n * 8 + lane % 4 * 2;
  const int key = work.key_block * kBlock + thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (query + e % 2 < a.p.seq_q && key + e / 2 * 8 < a.p.seq_k)
      move(e, query + e % 2, key + e / 2 * 8);
}

// Loads a consumer's bias of an owner, in powers of two. It is read once for all members, so any
// strides are fast enough, but all elements of a step at once: no branch may separate the reads.
template <class C, class Load>
__device__ __forceinline__ void load_bias_by(TriangleStorage<C>& shared, const TriangleArgs& a,
                                             int64_t base, int w, const Load& load) {
  const Work work(a, opaque(blockIdx.x));
  const FlashsciScoreStrides& s = a.p.bias_mask.bias_strides;
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int key = work.key_block * kBlock + thread / 32 * 16 + lane / 4;
#pragma unroll 1
  for (int step = 0; step < C::kSteps; ++step) {
    const int block = work.panel * C::kPanelBlocks + step * kConsumers + w;
    const int query = block * kBlock + lane % 4 * 2;
    float x[kBlock / 8][4];
#pragma unroll
    for (int n = 0; n < kBlock / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[n][e] = load(base + min(query + n * 8 + e % 2, a.p.seq_q - 1) * s.row +
                       min(key + e / 2 * 8, a.p.seq_k - 1) * s.column);
#pragma unroll
    for (int n = 0; n < kBlock / 8; ++n) {
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool inside = query + n * 8 + e % 2 < a.p.seq_q && key + e / 2 * 8 < a.p.seq_k;
        words[e] = __float_as_uint(inside ? x[n][e] * kLog2e : 0.f);
      }
      // Each lane reads only its own writes.
      ptx::st_shared(ptx::shared_address(shared.bias[w][step][n][thread]),
                     make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

template <class Op, class C>
__device__ __forceinline__ void load_bias(TriangleStorage<C>& shared, const TriangleArgs& a,
                                          uint32_t owner, int w) {
  const FlashsciBiasMask& given = a.p.bias_mask;
  const int64_t base = Place(a, owner, 0).offset(given.bias_strides);
  if (given.bias_is_fp32)
    load_bias_by(shared, a, base, w,
                 [&](int64_t at) { return __ldg(static_cast<const float*>(given.bias) + at); });
  else
    load_bias_by(shared, a, base, w, [&](int64_t at) {
      return Op::to_float(__ldg(static_cast<const uint16_t*>(given.bias) + at));
    });
}

// Stores the sums over this group's members of an owner, which no other CTA has, and clears them.
template <class C>
__device__ __forceinline__ void store_dbias(float (&dbias)[C::kSteps][kBlock / 2],
                                            const TriangleArgs& a, uint32_t owner, int w) {
  const Work work(a, opaque(blockIdx.x));  // recomputed: registers are scarce
  float* const sums =
      a.dbias_sums + int64_t{work.group + owner} * a.p.seq_q * static_cast<int64_t>(a.p.seq_k);
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
    const uint32_t block = work.panel * C::kPanelBlocks + step * kConsumers + w;
#pragma unroll
    for (int n = 0; n < kBlock / 8; ++n)
      for_elements(a, work, block, n, [&](int e, int query, int key) {
        sums[query * static_cast<int64_t>(a.p.seq_k) + key] = dbias[step][n * 4 + e];
      });
#pragma unroll
    for (int e = 0; e < kBlock / 2; ++e) dbias[step][e] = 0.f;
  }
}

}  // namespace flashsci::sm90::triangle_bwd
