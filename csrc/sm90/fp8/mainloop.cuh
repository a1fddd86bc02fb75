// A consumer warpgroup of the sm90 forward on 8-bit floats, head dims beyond 128 and blocks of 64 keys:
// `step` is what happens to a block of keys: S, its softmax, P as 8 bits, P V of this block alone, and
// the sum of all blocks in fp32. Nothing overlaps within a warpgroup, which lets the product of a block
// take the registers of its scores; the other warpgroups keep the tensor cores busy meanwhile.
#pragma once
#include <cstdint>

#include "consumer.cuh"

namespace flashsci::sm90::fp8 {

template <class C, bool kVarlen>
struct BlockConsumer : ConsumerState<C, kVarlen> {
  using State = ConsumerState<C, kVarlen>;
  using State::head;
  using State::kBlockK;
  using State::kHeadDim;
  using State::kHeadDimV;
  using State::kStages;
  using State::o;
  using State::rows;
  using State::shared;
  using State::State;
  static constexpr int kChunk = 64, kChunks = kHeadDimV / kChunk;  // columns of V at a time
  using Product = float[kChunk / 2];

  float s[kBlockK / 2];         // scores, then P
  uint32_t p[kBlockK / 32][4];  // P as operand, per 32 keys

  // --- products

  // Columns [kBegin, kEnd) of q and k.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void issue_qk(float (&scores)[kBlockK / 2], uint64_t q_tile,
                                           uint64_t k_tile) {
#pragma unroll
    for (int d = kBegin; d < kEnd; d += 32) {
      const int box = d / C::kSpan, column = d % C::kSpan;
      ptx::Qgmma<kBlockK>::ss(scores, q_tile + (box * C::QBox::kBytes + column) / 16,
                              k_tile + (box * C::KBox::kBytes + column) / 16, d > kBegin);
    }
  }
  // S = q k^T; returns the scales of this block's keys and values. No sum of the tensor cores runs
  // over more than 128 columns.
  __device__ __forceinline__ float2 find_scores(bool last) {
    constexpr int kFirst = kHeadDim < 128 ? kHeadDim : 128;
    this->wait_k(head);
    const float2 scales = shared.scales[head % kStages];
    const uint64_t q_tile = this->q_tile(), k_tile = this->k_tile(head % kStages);
    ptx::wgmma_fence();
    issue_qk<0, kFirst>(s, q_tile, k_tile);
    if constexpr (kHeadDim > kFirst) {
      float rest[kBlockK / 2];
      issue_qk<kFirst, kHeadDim>(rest, q_tile, k_tile);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(s);
      ptx::wgmma_tie(rest);
#pragma unroll
      for (int e = 0; e < kBlockK / 2; ++e) s[e] += rest[e];
    } else {
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(s);
    }
    this->release_k(head);
    if (last) this->release_q();
    return scales;
  }
  // P V of this block and columns [kChunk chunk, ...).
  __device__ __forceinline__ void issue_pv(Product& product, uint64_t v_tile, int chunk) {
#pragma unroll
    for (int n = 0; n < kBlockK / 32; ++n)
      ptx::Qgmma<kChunk>::rs(product, p[n], v_tile + (chunk * kChunk * kBlockK + n * 32) / 16,
                             n > 0);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void add_pv(const Product& product, int chunk, float v_scale) {
#pragma unroll
    for (int e = 0; e < kChunk / 2; ++e) {
      float& sum = o[chunk * (kChunk / 2) + e];
      sum = fmaf(product[e], v_scale, sum);
    }
  }
  // O += P V v_scale: products of one block in the tensor core, the sum over blocks in fp32. The sum
  // of a chunk is taken beside the product of the next.
  __device__ __forceinline__ void add_values(float v_scale) {
    Product product[2];
    const uint64_t v_tile = this->turned_tile(head % kStages);
    this->wait_v(head);
    ptx::wgmma_fence();
    issue_pv(product[0], v_tile, 0);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk + 1 < kChunks) {
        if (chunk > 0) ptx::wgmma_fence();  // sums have read what the next product overwrites
        issue_pv(product[(chunk + 1) % 2], v_tile, chunk + 1);
        ptx::wgmma_wait<1>();
      } else {
        ptx::wgmma_wait<0>();
        this->release_v(head);
      }
      ptx::wgmma_tie(product[chunk % 2]);
      add_pv(product[chunk % 2], chunk, v_scale);
    }
  }

  // --- blocks

  __device__ __forceinline__ void step(const Work<C>& work, int block) {
    const float2 scales = find_scores(block == work.own.first);
    this->find_exponents(s, work, block * kBlockK, scales.x,
                         [&](const float (&alpha)[2]) { State::multiply(o, alpha); });
    powers(s, rows);
    pack<0>(p, s);
    add_values(scales.y);
    ++head;
  }
  __device__ __forceinline__ void run() {
    State::run([&](const Work<C>& work) {
#pragma unroll 1
      for (int block = work.own.end - 1; block >= work.own.first; --block) step(work, block);
    });
  }
};

}  // namespace flashsci::sm90::fp8
