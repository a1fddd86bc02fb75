// The producers of the sm90 triangle attention: a warp for each member, of which the first loads the
// bias, too.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"

namespace flashsci::sm90::triangle {

// What a member sees of a block of 64 keys.
struct VisibleBlock {
  int block;
  uint32_t shown[2];
};

// The first block from `block` on of which the member sees a key; plan.blocks: none. A whole warp.
template <class C>
__device__ __forceinline__ VisibleBlock find_visible(const Args& a, const uint8_t* mask,
                                                     int block) {
  const int64_t stride = a.p.bias_mask.mask_strides.column;
#pragma unroll 1
  for (; block < a.plan.blocks; ++block) {
    VisibleBlock found{block};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = block * C::kBlockK + i * 32 + static_cast<int>(threadIdx.x % 32);
      const bool shown = key < a.p.seq_k && (mask == nullptr || __ldg(mask + key * stride) != 0);
      found.shown[i] = __ballot_sync(0xffffffffu, shown);
    }
    if ((found.shown[0] | found.shown[1]) != 0) return found;
  }
  return {block, {0, 0}};
}

// Brings the bias of one block once its stage is free. One thread.
template <class C>
__device__ __forceinline__ void load_bias(SharedStorage<C>& shared, const Args& a,
                                          BiasRing<C>& ring, const UnitWalk<C>& walk, int block) {
  using B = typename C::BiasBox;
  constexpr int kBytes = C::kRowTiles * C::kBiasTileBytes;
  static_assert(kBytes == C::kRowTiles * (C::kBlockK / B::kColumns) * B::kBytes &&
                    C::kBiasStart + kBytes == sizeof(shared.bias[0]),
                "the barrier expects all that arrives");
  const uint32_t full = ptx::shared_address(&shared.bias_full[ring.stage]);
  ptx::mbarrier_sleep(ptx::shared_address(&shared.bias_empty[ring.stage]), ring.phase ^ 1);
  const uint32_t stage = ptx::shared_address(shared.bias[ring.stage]);
  const uint32_t target = stage + C::kBiasStart;
  poison_stage(stage, sizeof(shared.bias[0]));
  ptx::mbarrier_arrive_expect(full, kBytes);
  const Batch at = walk.shared_batch();
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile)
#pragma unroll 1
    for (int box = 0; box < C::kBlockK / B::kColumns; ++box)
      ptx::tma_load_5d(target + tile * C::kBiasTileBytes + box * B::kBytes, &a.bias, full,
                       block * C::kBlockK + box * B::kColumns, walk.row + tile * 64, walk.head,
                       at.batch1, at.batch0);
  ring.next();
}

// Loads Q of all tiles of rows of a member. One thread.
template <class C>
__device__ __forceinline__ void load_q(SharedStorage<C>& shared, const Args& a,
                                       const UnitWalk<C>& walk, int member, uint32_t phase) {
  const Batch at = walk.batch(member);
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
    const int consumer = member * C::kRowTiles + tile;
    const uint32_t full = ptx::shared_address(&shared.q_full[consumer]);
    const uint32_t target = ptx::shared_address(shared.q[consumer]);
    ptx::mbarrier_sleep(ptx::shared_address(&shared.q_empty[consumer]), phase ^ 1);
    poison_stage(target, C::Rows::kBytes);
    ptx::mbarrier_arrive_expect(full, C::Rows::kBytes);
    ptx::tma_load_5d(target, &a.q, full, 0, walk.row + tile * 64, walk.head, at.batch1, at.batch0);
  }
}

// The ring of K and V of a member.
template <class C>
struct KeyRing {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == C::kStages) stage = 0, phase ^= 1;
  }
};

// Loads K and V of a block, and says which it is. One thread.
template <class C>
__device__ __forceinline__ void load_kv(SharedStorage<C>& shared, const Args& a,
                                        const KeyRing<C>& ring, const UnitWalk<C>& walk, int member,
                                        const VisibleBlock& visible, bool last) {
  const uint32_t full = ptx::shared_address(&shared.kv_full[member][ring.stage]);
  ptx::mbarrier_sleep(ptx::shared_address(&shared.kv_empty[member][ring.stage]), ring.phase ^ 1);
  const uint32_t k = ptx::shared_address(shared.k[member][ring.stage]);
  const uint32_t v = ptx::shared_address(shared.v[member][ring.stage]);
  poison_stage(k, C::Rows::kBytes);
  poison_stage(v, C::Rows::kBytes);
  ptx::st_shared(ptx::shared_address(&shared.info[member][ring.stage]),
                 make_uint4(visible.shown[0], visible.shown[1], visible.block * 2 + last, 0));
  ptx::mbarrier_arrive_expect(full, 2 * C::Rows::kBytes);
  const int head = walk.head / (a.p.heads_q / a.p.heads_k), key = visible.block * C::kBlockK;
  const Batch at = walk.batch(member);
  ptx::tma_load_5d(k, &a.k, full, 0, key, head, at.batch1, at.batch0);
  ptx::tma_load_5d(v, &a.v, full, 0, key, head, at.batch1, at.batch0);
}

// Runs ahead of the consumers of a member. One warp.
template <class C>
__device__ __forceinline__ void produce(SharedStorage<C>& shared, const Args& a, int member) {
  KeyRing<C> keys;
  BiasRing<C> bias;
  uint32_t phase = 0;      // of Q
  bool needs_bias = true;  // it changes, or does not stay
  for (UnitWalk<C> walk(a); walk.more(); walk.next(), phase ^= 1) {
    const uint8_t* mask = a.p.bias_mask.mask;
    if (mask != nullptr) {
      const FlashsciScoreStrides& strides = a.p.bias_mask.mask_strides;
      const Batch at = walk.batch(member);
      mask += at.batch0 * strides.batch0 + at.batch1 * strides.batch1 + walk.head * strides.head;
    }
    const bool brings_bias = member == 0 && needs_bias;
    int biased = 0;  // blocks whose bias is on its way
    const auto bring_bias = [&](int end) {
#pragma unroll 1
      for (; biased < end; ++biased) {
        BiasRing<C> here = bias;
        if (ptx::elect()) load_bias(shared, a, here, walk, biased);
        __syncwarp();
        bias.next();
      }
    };
    VisibleBlock next = find_visible<C>(a, mask, 0);
    if (next.block == a.plan.blocks) next.block = 0;  // a member without keys has a hidden block
    if (ptx::elect()) load_q(shared, a, walk, member, phase);
    __syncwarp();
    // All of it where it stays: consumers prepare it before they free K and V.
    if (brings_bias && a.plan.resident) bring_bias(a.plan.blocks);
#pragma unroll 1
    for (bool last = false; !last; keys.next()) {
      const VisibleBlock at = next;
      next = find_visible<C>(a, mask, at.block + 1);
      last = next.block == a.plan.blocks;
      if (ptx::elect()) load_kv(shared, a, keys, walk, member, at, last);
      __syncwarp();
      // After K and V: who waits for them does not free the bias of blocks before.
      if (brings_bias) bring_bias(last ? a.plan.blocks : at.block + 1);
    }
    if (a.plan.resident) {
      needs_bias = walk.leaves_tile();
      if (brings_bias && a.plan.blocks != C::kBiasStages) bias.stage = 0, bias.phase ^= 1;
    }
  }
}

}  // namespace flashsci::sm90::triangle
