// A consumer warpgroup of the sm90 forward on 8-bit floats, head dims up to 128 and blocks of 128 keys:
// products beside the softmax of the same warpgroup.
//
// A block's scores are two halves of 64 keys with registers of their own. While one becomes P, the
// tensor core computes the other, and in turn P V of the block before:
//
//   tensor core   P V 6, S_high 5   S_low 4          P V 5, S_high 4   S_low 3
//   warps         low 5             high 5, sum 6    low 4             high 4, sum 5
//
// P V of a block starts from zero and is added to O in fp32 beside exponentials. The exponents of both
// halves are checked before either is rounded to 8 bits, so that a block has one offset. Up to two
// consumers hold Q in registers: products of 64 keys would take all of the rate of shared memory with
// it.
#pragma once
#include <cstdint>

#include "../../ptx/ldmatrix.cuh"
#include "consumer.cuh"
#include "transpose.cuh"

namespace flashsci::sm90::fp8 {

template <class C, bool kVarlen>
struct HalvesConsumer : ConsumerState<C, kVarlen> {
  using State = ConsumerState<C, kVarlen>;
  using State::head;
  using State::kBlockK;
  using State::kHeadDim;
  using State::kHeadDimV;
  using State::kStages;
  using State::lane;
  using State::multiply;
  using State::o;
  using State::rows;
  using State::shared;
  using State::State;
  using State::tiles;
  using State::w;
  static constexpr int kHalf = kBlockK / 2;
  static_assert(kHalf == 64 && kHeadDim <= 128, "one sum of products each");
  // With three consumers there are none left for it.
  static constexpr bool kQInRegisters = C::kConsumers == 2;
  using Scores = float[kHalf / 2];

  Scores low, high;              // scores, their exponents, then P, of both halves of the keys
  float product[kHeadDimV / 2];  // P V of the block before
  uint32_t p[kBlockK / 32][4];   // P as operand, per 32 keys
  uint32_t q[kQInRegisters ? kHeadDim / 32 : 1][4];  // Q as operand, per 32 columns
  uint64_t q_tile;                                   // or its descriptor
  float product_scale[2];  // of rows g and g + 8: of the block's values, and to O's offset
  float key_scale;         // of the block whose scores are next

  // --- products

  __device__ __forceinline__ void load_q() {
    const int matrix = lane / 8, row = threadIdx.x / 32 % 4 * 16 + matrix % 2 * 8 + lane % 8;
    const uint32_t from = ptx::shared_address(shared.q[tiles % C::kQStages][w]) + row * C::kSpan;
    static_assert(C::kSpan == kHeadDim, "one box");
#pragma unroll
    for (int n = 0; n < kHeadDim / 32; ++n)
      ptx::ldmatrix_x4(q[n], from + ((n * 2 + matrix / 2) ^ swizzle_of<C::kSpan>(row)) * 16);
    this->release_q();
  }
  // S = q k^T of keys [kHalf half, ...) of a block.
  __device__ __forceinline__ void issue_qk(Scores& scores, uint64_t k_tile, int half) {
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 32) {
      const uint64_t keys = k_tile + (half * kHalf * C::kSpan + d) / 16;
      if constexpr (kQInRegisters)
        ptx::Qgmma<kHalf>::rs(scores, q[d / 32], keys, d > 0);
      else
        ptx::Qgmma<kHalf>::ss(scores, q_tile + d / 16, keys, d > 0);
    }
  }
  // P V of a block.
  __device__ __forceinline__ void issue_pv(uint64_t v_tile) {
#pragma unroll
    for (int i = 0; i < kBlockK / 32; ++i)
      ptx::Qgmma<kHeadDimV>::rs(product, p[i], v_tile + i * 32 / 16, i > 0);
  }
  // O += P V: products of one block in the tensor core, the sum over blocks in fp32.
  __device__ __forceinline__ void add_product() {
#pragma unroll
    for (int e = 0; e < kHeadDimV / 2; ++e)
      o[e] = fmaf(product[e], product_scale[e >> 1 & 1], o[e]);
  }

  // What is done between the issue of products and their wait. ptxas would take it before the one or
  // after the other. It moves nothing into or out of a loop, which this is not: no sum is negative.
  template <class Do>
  __device__ __forceinline__ void here(const Do& act) {
#pragma unroll 1
    do {
      act();
    } while (rows.sum[1] < 0.f);
  }

  // --- blocks

  // A block whose lower half has its exponents, and whose higher half its scores, or will have them;
  // the product of the block before is to be added.
  template <bool kLast>
  __device__ __forceinline__ void step(const Work<C>& work, int block) {
    const uint32_t stage = head % kStages, next = (head + 1) % kStages;
    const uint64_t k_next = this->k_tile(next), v_tile = this->turned_tile(stage);
    here([&] { powers(low, rows); });
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(product);
    ptx::wgmma_tie(high);
    const float value_scale = shared.scales[stage].y;
    this->release(shared.k_empty[stage]);
    if constexpr (kLast && !kQInRegisters) this->release_q();
    if (block + 1 < work.own.end) this->release_v(head - 1);
    this->find_exponents(high, work, block * kBlockK + kHalf, key_scale,
                         [&](const float (&alpha)[2]) {
                           multiply(o, alpha);
                           multiply(product_scale, alpha);
                           multiply(low, alpha);
                         });
    pack<0>(p, low);
    if constexpr (!kLast) {
      this->wait(shared.k_full[next], (head + 1) / kStages);
      key_scale = shared.scales[next].x;
      ptx::wgmma_fence();
      issue_qk(low, k_next, 0);
      ptx::wgmma_commit();
    }

    here([&] {
      powers(high, rows);
      add_product();
      pack<kHalf / 32>(p, high);
    });
    product_scale[0] = product_scale[1] = value_scale;
    if constexpr (!kLast) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(low);
    }
    this->wait(shared.turned_full[stage], head / kStages);
    ptx::wgmma_fence();
    issue_pv(v_tile);
    if constexpr (!kLast) issue_qk(high, k_next, 1);
    ptx::wgmma_commit();
    if constexpr (!kLast)
      this->find_exponents(low, work, (block - 1) * kBlockK, key_scale,
                           [&](const float (&alpha)[2]) {
                             multiply(o, alpha);
                             multiply(product_scale, alpha);
                           });
    ++head;
  }
  __device__ __forceinline__ void attend(const Work<C>& work) {
    int block = work.own.end - 1;
    if constexpr (kQInRegisters)
      load_q();
    else
      q_tile = State::q_tile();
    this->wait_k(head);
    key_scale = shared.scales[head % kStages].x;
    const uint64_t first = this->k_tile(head % kStages);
    ptx::wgmma_fence();
    issue_qk(low, first, 0);
    issue_qk(high, first, 1);
    ptx::wgmma_commit();
#pragma unroll
    for (int e = 0; e < kHeadDimV / 2; ++e) product[e] = 0.f;
    product_scale[0] = product_scale[1] = 0.f;
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(low);
    ptx::wgmma_tie(high);
    this->find_exponents(low, work, block * kBlockK, key_scale, [](const float (&)[2]) {});
#pragma unroll 1
    for (; block > work.own.first; --block) step<false>(work, block);
    step<true>(work, block);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(product);
    this->release_v(head - 1);
    add_product();
  }
  __device__ __forceinline__ void run() {
    State::run([&](const Work<C>& work) { attend(work); });
  }
};

}  // namespace flashsci::sm90::fp8
