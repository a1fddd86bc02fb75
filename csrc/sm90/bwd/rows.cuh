// Items of rows among the tiles of the sm90 backward (`find_work`): a query tile at a time by a
// warpgroup.
#pragma once
#include <cstdint>

#include "../../ptx/fence.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"
#include "postprocess.cuh"
#include "preprocess.cuh"

namespace flashsci::sm90::bwd {

// The part of warpgroup `worker` in an item. barrier: a named one of its own. sums: 2 kBlockQ floats of
// shared memory of its own.
template <class Op, class C>
__device__ __forceinline__ void work_on_rows(const BackwardArgs& a, const KeyTile& tile,
                                             uint32_t worker, int barrier, float* sums) {
  const uint32_t thread = threadIdx.x % 128;
  const uint32_t bundle = tile.bundle, begin = tile.begin + worker, end = tile.end;
  if (tile.work == Work::kPrepare) {
    for (uint32_t i = begin; i < end; i += kRowWorkers<C>) {
      const uint32_t turn = (i - begin) / kRowWorkers<C> % 2;
      prepare_rows<Op, C, 128>(a, find_query_tile<C, false>(a, i), i, thread,
                               sums + turn * C::kBlockQ,
                               [&](bool x) { return !ptx::barrier_all(barrier, 128, !x); });
    }
    ptx::fence_proxy_async_global();
    ptx::barrier_sync(barrier, 128);
    if (thread == 0) ptx::add_release(a.prepared + bundle, 1);
  } else {
    if (thread % 32 == 0) wait_count(a.added + bundle, all_added<C>(a, bundle));
    __syncwarp();
    for (uint32_t i = begin; i < end; i += kRowWorkers<C>)
      finish_rows<Op, C, 128>(a, find_query_tile<C, false>(a, i), i, thread);
  }
}

}  // namespace flashsci::sm90::bwd
