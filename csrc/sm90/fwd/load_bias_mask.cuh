// The producers of bias and mask of the sm90 forward, with a separate ring: they come from DRAM and
// fill more of the shared memory than K and V.
//
// TMA brings boxes of rows that begin at multiples of 16 bytes. A bias whose rows begin elsewhere, as
// those of 1,023 keys, comes in windows: for each row of the tile one bulk copy of the pieces of 16
// bytes that hold its keys of the block. Each of these pieces holds a number of the bias, so that
// none is beyond the memory of its tensor.
#pragma once
#include <cstdint>

#include "../../ptx/bulk.cuh"
#include "load.cuh"

namespace flashsci::sm90::fwd {

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
  if (bias_mask.bias != nullptr) {
    const int box_keys = bias_box_keys<C>(bias_mask.bias_is_fp32);
#pragma unroll
    for (int w = 0; w < C::kConsumers; ++w) {
      if (w > 0 && plan.bias_step == 0) break;
#pragma unroll 1
      for (int i = 0; i < C::kBlockK / box_keys; ++i)
        ptx::tma_load_5d(target + w * plan.bias_step + i * plan.box_step, &a.bias, full,
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

// The same for a bias that comes in windows. kWindowLoaders threads, each for its rows; the first
// ones load the boxes of the mask as well.
template <class C>
__device__ __forceinline__ void stream_windows(SharedStorage<C>& shared, const ForwardArgs& a) {
  const auto address = [](const void* x) { return ptx::shared_address(x); };
  const BiasMaskPlan& plan = a.bias_mask;
  const Window window = window_of(a.p, a.p.seq_q, a.p.seq_k);
  const int loader = threadIdx.x % kWindowLoaders;
  BiasMaskRing ring;
#pragma unroll 1
  for (uint32_t tiles = 0;; ++tiles) {
    ptx::mbarrier_sleep(address(&shared.tile_ready[tiles % kTileSlots]), tiles / kTileSlots & 1);
    const TileInfo& tile = shared.tile_info[tiles % kTileSlots];
    if (tile.row < 0) break;
    const uintptr_t row = bias_row(a, tile, tile.row + loader);
    const int rows = plan.bias_rows == 1 ? 1 : min(a.p.seq_q - tile.row, C::kBlockQ);
    const Blocks<C> blocks(window, tile.row, C::kBlockQ, a.p.seq_q);
#pragma unroll 1
    for (int block = blocks.end - 1; block >= blocks.first; --block) {
      const uint32_t empty = address(&shared.bias_mask_empty[ring.stage]);
      const uint32_t full = address(&shared.bias_mask_full[ring.stage]);
      const uint32_t target = address(shared.bias_mask) + ring.stage * plan.stage_bytes;
      const int key = block * C::kBlockK;
      ptx::mbarrier_sleep(empty, (ring.phase & 1) ^ 1);
      uint32_t own_bytes = 0;
      if (loader < C::kConsumers) {  // in the name of a consumer that does not see the block
        const Blocks<C> own(window, tile.row + loader * 64, 64, a.p.seq_q);
        if (block < own.first || block >= own.end) ptx::mbarrier_arrive(empty, 4);
      }
      if (a.p.bias_mask.mask != nullptr && loader < (plan.mask_step == 0 ? 1 : C::kConsumers)) {
        const uint32_t mask = target + plan.mask + loader * plan.mask_step;
        poison_stage(mask, plan.mask_step == 0 ? 1024 : plan.mask_step);
        ptx::tma_load_5d(mask, &a.mask, full, key, tile.row + loader * 64, tile.head, tile.batch1,
                         tile.batch0);
        if (loader == 0) own_bytes = plan.loaded;  // of all these boxes
      }
      const uint32_t wanted = min(a.p.seq_k - key, C::kBlockK) * plan.element + 15;
      uintptr_t first = row + key * plan.element;
#pragma unroll 1
      for (int i = loader; i < rows; i += kWindowLoaders) {
        const uint32_t size = (static_cast<uint32_t>(first) % 16 + wanted) / 16 * 16;
        const uint32_t to = target + i * plan.window;
        poison_stage(to, plan.window);
        ptx::bulk_load(to, reinterpret_cast<const void*>(first / 16 * 16), size, full);
        own_bytes += size;
        first += plan.next_row;
      }
      // The last of these arrivals ends the phase, so that copies may have come before them.
      ptx::mbarrier_arrive_expect(full, own_bytes);
      ring.next(plan);
    }
    __syncwarp();  // all have read the record
    if (threadIdx.x % 32 == 0)
      ptx::mbarrier_arrive(address(&shared.q_empty[tiles % C::kQStages][0]));
  }
}

}  // namespace flashsci::sm90::fwd
