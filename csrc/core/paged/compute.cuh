// The beginning of every warp of paged_kernel, and the work of the computing warps.
#pragma once
#include <cstdint>

#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../poison.cuh"
#include "gather.cuh"
#include "plan.cuh"

namespace flashsci::paged {

// For a CTA that has no block.
__device__ __forceinline__ void leave_no_cut(const Plan& plan) {
  if (threadIdx.x == 0) plan.cuts[blockIdx.x].last = -1;
}

// loads: number of arrivals that make a block of K or V full.
template <class C>
__device__ __forceinline__ void init_barriers(Storage<C>& shared, int stages, int loads) {
  const auto init = [](uint64_t& barrier, int count) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), count);
  };
  for (int stage = 0; stage < stages; ++stage) {
    init(shared.k_full[stage], loads), init(shared.k_empty[stage], kWarps);
    init(shared.v_full[stage], loads), init(shared.v_empty[stage], kWarps);
  }
  for (int stage = 0; stage < C::kQStages; ++stage) {
    init(shared.q_full[stage], 32), init(shared.q_empty[stage], kWarps + 1);
  }
  init(shared.sums_full, kWarps), init(shared.sums_empty, 1);
}

// Called by all threads of a CTA once there may be a plan: calls work(cursor, runs) if the CTA has
// work.
template <class C, class Work>
__device__ __forceinline__ void for_run(Storage<C>& shared, const Args& a, const Work& work) {
  static_assert(sizeof(shared.sums) >= sizeof(Planning), "which nobody needs yet");
  auto& planning = *reinterpret_cast<Planning*>(&shared.sums);
  Runs runs(0, 0, 0);
  const Start start =
      a.plan.count <= kPlannedByEach ? plan_and_begin<C>(a, runs, planning) : begin_of(a, runs);
  const int begin = runs.begin(blockIdx.x), end = runs.begin(blockIdx.x + 1);
  if (begin >= end) return leave_no_cut(a.plan);
  const Cursor cursor(a.plan, runs, begin, end, start);
  if (cursor.done()) return leave_no_cut(a.plan);
  work(cursor, runs);
}

template <class Op, class Format, class C>
__device__ __forceinline__ void compute(Storage<C>& shared, const Args& a, int warp) {
  Turn turn;
  uint32_t tiles = 0, handed = 0;
  for (bool more = true; more; ++tiles) {
    const uint32_t stage = tiles % C::kQStages;
    C::Isa::wait(shared.q_full[stage], tiles / C::kQStages & 1);
    const Rows rows(a, shared.tiles[stage]);
    const float v_scale = shared.v_scale[stage];
    WarpTile<Op, Format, C> warp_tile(shared, a, rows, stage, warp);
    warp_tile.run(turn);
    warp_tile.release(shared.q_empty[stage]);           // and the tile's copied data
    C::Isa::wait(shared.sums_empty, (handed & 1) ^ 1);  // the previous sums have been read
    more = rows.tile.more;
    if (rows.rows > kFewRows<C> || (!more && !C::kSharesLast)) {
      gather(warp_tile, v_scale);
    } else if (!more) {
      gather_few(warp_tile, v_scale);
    } else {
      leave_all(warp_tile);
      warp_tile.release(shared.sums_full);
      ++handed;
    }
  }
}

}  // namespace flashsci::paged
