// The producers of bias and mask of the sm90 forward, with a separate ring: they come from DRAM and
// fill more of the shared memory than K and V.
//
// TMA brings boxes of rows that begin at multiples of 16 bytes. Rows of a bias may begin elsewhere,
// as those of 1,023 keys, if the rows of all heads lie on one lattice, at multiples of their pitch:
// flat rows. Those eight apart (four in fp32) begin at the same place in 16 bytes, so that each of
// these eight classes has a map of its own, from the 16 bytes on in which its first row begins. A
// piece of 16 bytes that is read holds a number of the bias, or lies between two of its rows: none
// is beyond the memory of the tensor.
// Box l of a block holds the rows l, l + 8, .. of the tile for all consumers, 16 bytes longer than
// their keys. All boxes begin in the same bank and a row is an odd number of 16 bytes, so l rows
// that nobody reads come before those of box l: eight neighbouring rows begin in eight different
// banks. In fp32 two rows may meet in a bank.
#pragma once
#include <cstdint>

#include "load.cuh"

namespace flashsci::sm90::fwd {

// The boxes of a bias whose rows begin anywhere.
template <class Coord>
__device__ __forceinline__ void load_lattice(const ForwardArgs& a, uint32_t target, uint32_t full,
                                             int key, int row, const Coord& at) {
  const BiasMaskPlan& plan = a.bias_mask;
  const int bits = lattice_bits(a.p.bias_mask.bias_is_fp32);
  const int first = plan.flat_row(at, row);
#pragma unroll 1
  for (int l = 0; l < plan.boxes; ++l)
    ptx::tma_load_5d(target + l * plan.box_step, &a.bias[(first + l) & ((1 << bits) - 1)], full,
                     key, ((first + l) >> bits) - l, 0, 0, 0);
}

// Loads bias and mask of a tile's rows and a block's keys once their stage is free. skipping:
// consumers that do not see them.
template <class C, class Coord>
__device__ __forceinline__ void load_bias_mask(SharedStorage<C>& shared, const ForwardArgs& a,
                                               BiasMaskRing& ring, uint32_t skipping, int row,
                                               int block, const Coord& at) {
  const FlashsciBiasMask& bias_mask = a.p.bias_mask;
  const BiasMaskPlan& plan = a.bias_mask;
  const uint32_t empty = ptx::shared_address(&shared.bias_mask_empty[ring.stage]);
  const uint32_t full = ptx::shared_address(&shared.bias_mask_full[ring.stage]);
  ptx::mbarrier_sleep(empty, (ring.phase & 1) ^ 1);
  if (skipping > 0) ptx::mbarrier_arrive(empty, 4 * skipping);
  poison_stage(ptx::shared_address(shared.bias_mask) + ring.stage * plan.stage_bytes,
               plan.stage_bytes);
  ptx::mbarrier_arrive_expect(full, plan.loaded);
  const int key = block * C::kBlockK;
  const uint32_t target = ptx::shared_address(shared.bias_mask) + ring.stage * plan.stage_bytes;
  if (C::kHasLattice && plan.boxes > 0) {
    load_lattice(a, target, full, key, row, at);
  } else if (bias_mask.bias != nullptr) {
    const int box_keys = bias_box_keys<C>(bias_mask.bias_is_fp32);
#pragma unroll
    for (int w = 0; w < C::kConsumers; ++w) {
      if (w > 0 && plan.bias_step == 0) break;
#pragma unroll 1
      for (int i = 0; i < C::kBlockK / box_keys; ++i)
        ptx::tma_load_5d(target + w * plan.bias_step + i * plan.box_step, a.bias, full,
                         key + i * box_keys, row + w * 64, at.head, at.batch1, at.batch0);
    }
  }
  if (bias_mask.mask != nullptr) {
#pragma unroll
    for (int w = 0; w < C::kConsumers; ++w) {
      if (w > 0 && plan.mask_step == 0) break;
      ptx::tma_load_5d(target + plan.mask + w * plan.mask_step, &a.mask, full, key, row + w * 64,
                       at.head, at.batch1, at.batch0);
    }
  }
  ring.next(plan);
}

// Runs in parallel with `load_kv` (load.cuh), along the same list. One thread.
template <class C>
__device__ __forceinline__ void stream_bias_mask(SharedStorage<C>& shared, const ForwardArgs& a) {
  const auto address = [](const void* x) { return ptx::shared_address(x); };
  const Window window = window_of(a.p, a.p.seq_q, a.p.seq_k);
  BiasMaskRing ring;
#pragma unroll 1
  for (uint32_t tiles = 0;; ++tiles) {
    ptx::mbarrier_sleep(address(&shared.tile_ready[tiles % kTileSlots]), tiles / kTileSlots & 1);
    const TileInfo& tile = shared.tile_info[tiles % kTileSlots];
    if (tile.row < 0) break;
    const Blocks<C> blocks(window, tile.row, C::kBlockQ, a.p.seq_q);
#pragma unroll 1
    for (int block = blocks.end - 1; block >= blocks.first; --block) {
      uint32_t skipping = 0;
#pragma unroll
      for (int w = 0; w < C::kConsumers; ++w) {
        const Blocks<C> own(window, tile.row + w * 64, 64, a.p.seq_q);
        skipping += block < own.first || block >= own.end;
      }
      load_bias_mask<C>(shared, a, ring, skipping, tile.row, block, tile);
    }
    ptx::mbarrier_arrive(address(&shared.q_empty[tiles % C::kQStages][0]));
  }
}

}  // namespace flashsci::sm90::fwd
