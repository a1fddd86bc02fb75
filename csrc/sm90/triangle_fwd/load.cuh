// The producers of the sm90 triangle attention: a warp for each member; the first one loads the
// bias, too.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"
#include "schedule.cuh"

namespace flashsci::sm90::triangle_fwd {

// The mask of a member for kChunk keys from first_key on: lane i of a warp has the bits of 32 keys
// from 32 i on. All loads are issued at once: a warp that waits for memory at each block is too
// slow for its consumers.
struct VisibleKeys {
  static constexpr int kChunk = 32 * 32;
  uint32_t word;
  int first_key;

  // Loads kWords words from the i-th on. kStride: the stride of keys, 0 if it is known at run time
  // only.
  template <int kWords, int kStride>
  __device__ __forceinline__ void read(const Args& a, const uint8_t* mask, int i) {
    const int lane = threadIdx.x % 32, key = first_key + i * 32 + lane;
    const int64_t stride = kStride != 0 ? kStride : a.p.bias_mask.mask_strides.column;
    uint8_t shown[kWords];
#pragma unroll
    for (int j = 0; j < kWords; ++j)
      shown[j] = key + j * 32 < a.p.seq_k ? __ldg(mask + (key + j * 32) * stride) : 0;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const uint32_t found = __ballot_sync(0xffffffffu, shown[j] != 0);
      if (lane == i + j) word = found;
    }
  }
  // Called by a whole warp.
  __device__ __forceinline__ void load(const Args& a, const uint8_t* mask, int chunk) {
    first_key = chunk * kChunk;
    if (mask == nullptr) {
      const int keys = a.p.seq_k - first_key - static_cast<int>(threadIdx.x % 32) * 32;
      word = keys >= 32 ? ~0u : keys > 0 ? (1u << keys) - 1 : 0u;
      return;
    }
    word = 0;
    constexpr int kAtOnce = 12;  // the 384 keys of a common crop
    const bool neighbours = a.p.bias_mask.mask_strides.column == 1;
#pragma unroll 1
    for (int i = 0; i < 32 && first_key + i * 32 < a.p.seq_k; i += neighbours ? kAtOnce : 1)
      if (neighbours)
        read<kAtOnce, 1>(a, mask, i);
      else
        read<1, 0>(a, mask, i);
  }
};

// A block of 64 keys and the keys of it that the member sees.
struct VisibleBlock {
  int block;
  uint32_t shown[2];
};

// The first block from `block` on with a key that the member sees; plan.blocks: none. keys: of the
// chunk that `block` is in. Called by a whole warp.
__device__ __forceinline__ VisibleBlock find_visible(const Args& a, const uint8_t* mask,
                                                     VisibleKeys& keys, int block) {
  constexpr int kBlocks = VisibleKeys::kChunk / 64;
  for (;;) {
    const int first = keys.first_key / 64;
    const uint32_t words = __ballot_sync(0xffffffffu, keys.word != 0);
    const uint32_t blocks = (words | words >> 1) & 0x55555555u;  // bit 2 i: block first + i
    const uint32_t left = block < first + kBlocks ? blocks & ~0u << 2 * (block - first) : 0u;
    if (left != 0) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      return {first + lane / 2,
              {__shfl_sync(0xffffffffu, keys.word, lane),
               __shfl_sync(0xffffffffu, keys.word, lane + 1)}};
    }
    block = first + kBlocks;
    if (block >= a.plan.blocks) return {a.plan.blocks, {0, 0}};
    keys.load(a, mask, block / kBlocks);
  }
}

// Loads the bias of one block once its stage is free. One thread.
template <class C>
__device__ __forceinline__ void load_bias(SharedStorage<C>& shared, const Args& a,
                                          BiasRing<C>& ring, const UnitWalk<C>& walk, int block) {
  using B = typename C::BiasBox;
  static_assert(sizeof(shared.bias[0]) - C::kBiasStart ==
                    C::kRowTiles * (C::kBlockK / B::kColumns) * B::kBytes,
                "the barrier expects all that arrives");
  const uint32_t full = ptx::shared_address(&shared.bias_full[ring.stage]);
  ptx::mbarrier_sleep(ptx::shared_address(&shared.bias_empty[ring.stage]), ring.phase ^ 1);
  const uint32_t stage = ptx::shared_address(shared.bias[ring.stage]);
  const uint32_t target = stage + C::kBiasStart;
  poison_stage(stage, sizeof(shared.bias[0]));
  ptx::mbarrier_arrive_expect(full, sizeof(shared.bias[0]) - C::kBiasStart);
  const Batch at = walk.batch(0);  // the same for all members
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile)
#pragma unroll 1
    for (int box = 0; box < C::kBlockK / B::kColumns; ++box)
      ptx::tma_load_5d(target + tile * C::kBiasTileBytes + box * B::kBytes, &a.bias, full,
                       block * C::kBlockK + box * B::kColumns, walk.row + tile * 64, walk.head,
                       at.batch1, at.batch0);
  ring.next();
}

// Loads Q of all tiles of rows of a member, which is at `place` in its unit. One thread.
template <class C>
__device__ __forceinline__ void load_q(SharedStorage<C>& shared, const Args& a,
                                       const UnitWalk<C>& walk, int place, int member,
                                       uint32_t phase) {
  const Batch at = walk.batch(member);
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
    const int consumer = place * C::kRowTiles + tile;
    const uint32_t full = ptx::shared_address(&shared.q_full[consumer]);
    const uint32_t target = ptx::shared_address(shared.q[consumer]);
    ptx::mbarrier_sleep(ptx::shared_address(&shared.q_empty[consumer]), phase ^ 1);
    poison_stage(target, C::Rows::kBytes);
    ptx::mbarrier_arrive_expect(full, sizeof(shared.q[0]));
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

// Loads K and V of a block, and publishes its index. One thread.
template <class C>
__device__ __forceinline__ void load_kv(SharedStorage<C>& shared, const Args& a,
                                        const KeyRing<C>& ring, const UnitWalk<C>& walk, int place,
                                        int member, const VisibleBlock& visible, bool last) {
  const uint32_t full = ptx::shared_address(&shared.kv_full[place][ring.stage]);
  ptx::mbarrier_sleep(ptx::shared_address(&shared.kv_empty[place][ring.stage]), ring.phase ^ 1);
  const uint32_t k = ptx::shared_address(shared.k[place][ring.stage]);
  const uint32_t v = ptx::shared_address(shared.v[place][ring.stage]);
  poison_stage(k, C::Rows::kBytes);
  poison_stage(v, C::Rows::kBytes);
  ptx::st_shared(ptx::shared_address(&shared.info[place][ring.stage]),
                 make_uint4(visible.shown[0], visible.shown[1], visible.block * 2 + last, member));
  ptx::mbarrier_arrive_expect(full, sizeof(shared.k[0][0]) + sizeof(shared.v[0][0]));
  const int head = walk.head / (a.p.heads_q / a.p.heads_k), key = visible.block * C::kBlockK;
  const Batch at = walk.batch(member);
  ptx::tma_load_5d(k, &a.k, full, 0, key, head, at.batch1, at.batch0);
  ptx::tma_load_5d(v, &a.v, full, 0, key, head, at.batch1, at.batch0);
}

// Runs ahead of the consumers of the members at one place of their units. One warp.
template <class C>
__device__ __forceinline__ void produce(SharedStorage<C>& shared, const Args& a, int place) {
  GroupOrder order;
  bool enters_tile = true;
  KeyRing<C> keys;
  BiasRing<C> bias;
  uint32_t phase = 0;      // of Q
  bool needs_bias = true;  // it changes, or is not resident
  for (UnitWalk<C> walk(a); walk.more(); walk.next(), phase ^= 1) {
    if (enters_tile) order.enter_tile(walk);
    enters_tile = walk.leaves_tile();
    // The last group may have fewer members than others: some warps repeat the work of the last
    // member, and store the same results.
    const auto member =
        static_cast<int>(min(order.group(walk) * C::kMembers + place, a.plan.members - 1));
    const uint8_t* mask = a.p.bias_mask.mask;
    if (mask != nullptr) {
      const FlashsciScoreStrides& strides = a.p.bias_mask.mask_strides;
      const Batch at = walk.batch(member);
      mask += at.batch0 * strides.batch0 + at.batch1 * strides.batch1 + walk.head * strides.head;
    }
    const bool brings_bias = place == 0 && needs_bias;
    int biased = 0;  // blocks whose bias has been requested
    const auto bring_bias = [&](int end) {
      if (a.plan.bias_copied != 0) ptx::wait_for_prerequisites();
#pragma unroll 1
      for (; biased < end; ++biased) {
        BiasRing<C> here = bias;
        if (ptx::elect()) load_bias(shared, a, here, walk, biased);
        __syncwarp();
        bias.next();
      }
    };
    if (ptx::elect()) load_q(shared, a, walk, place, member, phase);
    __syncwarp();
    VisibleKeys seen;
    seen.load(a, mask, 0);
    VisibleBlock next = find_visible(a, mask, seen, 0);
    if (next.block == a.plan.blocks) next.block = 0;  // a member without keys has a hidden block
    // All blocks of a resident bias: consumers prepare it before they free K and V.
    if (brings_bias && a.plan.resident) bring_bias(a.plan.blocks);
#pragma unroll 1
    for (bool last = false; !last; keys.next()) {
      const VisibleBlock at = next;
      next = find_visible(a, mask, seen, at.block + 1);
      last = next.block == a.plan.blocks;
      if (ptx::elect()) load_kv(shared, a, keys, walk, place, member, at, last);
      __syncwarp();
      // After K and V: consumers that wait for them do not free the bias of earlier blocks.
      if (brings_bias) bring_bias(last ? a.plan.blocks : at.block + 1);
    }
    if (a.plan.resident) {
      needs_bias = walk.leaves_tile();
      if (brings_bias && a.plan.blocks != C::kBiasStages) bias.stage = 0, bias.phase ^= 1;
    }
  }
}

}  // namespace flashsci::sm90::triangle_fwd
