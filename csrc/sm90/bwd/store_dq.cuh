// The warps of the sm90 backward that add dQ of a consumer to its fp32 accumulator in global
// memory.
#pragma once
#include <cstdint>

#include "../../ptx/bulk.cuh"
#include "../../ptx/fence.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"

namespace flashsci::sm90::bwd {

// Adds dQ of consumer w for the blocks of a tile; count: number of blocks before it.
template <class C>
__device__ __forceinline__ void add_dq_of_tile(BackwardStorage<C>& shared, const BackwardArgs& a,
                                               const KeyTile& tile, int w, bool in_turns,
                                               uint32_t& count) {
  const int heads = a.p.heads_q / a.p.heads_k;
#pragma unroll 1
  for (int head = tile.head * heads; head < (tile.head + 1) * heads; ++head) {
#pragma unroll 1
    for (int block = tile.begin; block < tile.end; ++block, ++count) {
      const uint32_t stage = count % C::kDqStages;
      sleep_for(shared.dq_full[stage][w], count / C::kDqStages);
      if (wants_dq<C>(a, w)) {
        const uint32_t part = statistics_tile(a, tile, head, block) * C::kConsumers + w;
        if (in_turns) {
          wait_semaphore(a.dq_semaphores + part, semaphore_value<C>(a, tile, block));
          ptx::fence_proxy_async_global();
        }
        ptx::bulk_add_f32(dq_of<C>(a, part, w), ptx::shared_address(shared.dq[stage][w]),
                          C::dq_columns(w) * 256);
        ptx::bulk_commit();
        if (in_turns) {
          ptx::bulk_wait<0>();
          ptx::fence_proxy_async_global();
          ptx::add_release(a.dq_semaphores + part, 1);
        } else {
          ptx::bulk_wait_read<C::kDqStages - 1>();
        }
      }
      // The previous copy has been read (in turns also this one, which is not needed yet).
      if (count + 1 >= C::kDqStages)
        ptx::mbarrier_arrive(ptx::shared_address(&shared.dq_empty[(count + 1) % C::kDqStages][w]));
    }
  }
}

template <class C, bool kVarlen>
__device__ __forceinline__ void add_dq(BackwardStorage<C>& shared, const BackwardArgs& a, int w) {
  ptx::wait_for_prerequisites();  // may still clear the accumulator
  const bool in_turns = a.dq_semaphores != nullptr && semaphores_come<kVarlen>(a);
  uint32_t iter = 0;
  if constexpr (C::kManyTiles) {
#pragma unroll 1
    for (uint32_t count = 0;; ++count) {
      sleep_for(shared.queue.tile_full[count % 2], count / 2);
      const KeyTile& tile = shared.tile[count % 2];
      if (tile.row < 0) break;
      add_dq_of_tile<C>(shared, a, tile, w, in_turns, iter);
      ptx::mbarrier_arrive(ptx::shared_address(&shared.queue.tile_empty[count % 2]));
    }
  } else {
    add_dq_of_tile<C>(shared, a, shared.tile[0], w, in_turns, iter);
  }
  ptx::bulk_wait<0>();
}

}  // namespace flashsci::sm90::bwd
