// Adds dQ to its fp32 accumulator, at head dims above 128: in slices of columns.
#pragma once
#include <cstdint>

#include "../../ptx/bulk.cuh"
#include "../../ptx/fence.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"
#include "config_d256.cuh"

namespace flashsci::sm90::bwd {

// dQ of consumer w: the first slice of the first block; with each later block the last slice of the
// previous block and the first of this one; finally the last slice of the last block.
template <class C, bool kVarlen>
__device__ __forceinline__ void add_dq_d256(BackwardStorage<C>& shared, const BackwardArgs& a,
                                            const KeyTile& tile, int w) {
  ptx::wait_for_prerequisites();  // may still clear the accumulator
  const bool come = semaphores_come<kVarlen>(a);
  uint32_t count = 0;
  const auto wait = [&] { sleep_for(shared.dq_full[0][w], count++); };
  const auto pass = [&] { ptx::mbarrier_arrive(ptx::shared_address(&shared.dq_empty[0][w])); };
  if (tile.begin < tile.end) wait(), pass();
  const int heads = a.p.heads_q / a.p.heads_k;
  for (int head = tile.head * heads; head < (tile.head + 1) * heads; ++head) {
#pragma unroll 1
    for (int block = tile.begin; block < tile.end; ++block) {
#pragma unroll 1
      for (int slice = 0; slice < C::kSlices; ++slice) {
        wait();
        const int column = C::slice_begin(w, slice);
        const bool wanted = a.p.dq != nullptr && column < a.p.head_dim;
        const bool in_turn = wanted && a.dq_semaphores != nullptr && come;
        const int64_t query_tile = statistics_tile(a, tile, head, block);
        int* const iter = a.dq_semaphores + query_tile * C::kCounters + w * C::kSlices + slice;
        if (in_turn) {
          wait_semaphore(iter, semaphore_value<C>(a, tile, block));
          ptx::fence_proxy_async_global();
        }
        if (wanted) {
          ptx::bulk_add_f32(a.dq + (query_tile * C::kHeadDim + column) * 64,
                            ptx::shared_address(shared.dq[0][w]), C::slice_columns(w, slice) * 256);
          ptx::bulk_commit();
          ptx::bulk_wait_read<0>();
        }
        pass();
        if (in_turn) {
          ptx::bulk_wait<0>();
          ptx::fence_proxy_async_global();
          ptx::add_release(iter, 1);
        }
      }
    }
  }
  ptx::bulk_wait<0>();
}

}  // namespace flashsci::sm90::bwd
