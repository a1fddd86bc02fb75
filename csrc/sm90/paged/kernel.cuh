// Paged attention for few queries of each sequence, Hopper: decoding from a paged KV cache.
//
// Maths     That of fwd/kernel.cuh; a sink adds one logit to each row's sum.
// Work      Rows are (query, head of the group) pairs, 64 to a tile, so that a sequence that decodes
//           reads its keys once for all heads that share them. plan_kernel finds the tiles and the
//           blocks of keys that each sees, from lengths on the device; the blocks of all tiles in a
//           row, for one head after the other, are cut into equal runs, one for each CTA, and
//           combine_kernel puts together what was cut.
// Roles     Warps 0 - 3 compute (one warpgroup, 64 rows), warp 4 loads K and V, warp 5 finds what
//           tile is next and loads its Q, ahead of the others.
// Shared    Two tiles of Q [64 columns][64 rows] (one at head dim 256), a ring of K and V [stage][64 columns][kBlockK rows] in
//           128-byte swizzled boxes: `Storage`.
// Pages     A lane of warp 4 looks up the page of the rows that it copies, some blocks ahead. A copy
//           takes as many rows as pages and blocks have in common, 16 at least.
// Limits    Memory. Prompts are right, but one warpgroup is slow at them.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../core/poison.cuh"
#include "load.cuh"
#include "mainloop.cuh"
#include "plan.cuh"

namespace flashsci::sm90::paged {

template <class Op, class C>
__global__ void __launch_bounds__(C::kThreads, 1) paged_kernel(const __grid_constant__ Args a) {
  extern __shared__ unsigned char shared_memory[];
  auto& shared =
      *reinterpret_cast<Storage<C>*>(shared_memory + (-ptx::shared_address(shared_memory) & 1023u));
  poison_block(&shared, sizeof(shared));
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&a.k);
    ptx::prefetch_tensor_map(&a.v);
    for (int stage = 0; stage < C::kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.k_full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.v_full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.k_empty[stage]), 4);
      ptx::mbarrier_init(ptx::shared_address(&shared.v_empty[stage]), 4);
    }
    for (int stage = 0; stage < C::kQStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.q_full[stage]), 32);
      ptx::mbarrier_init(ptx::shared_address(&shared.q_empty[stage]), 4);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();  // the plan
  if (a.plan.count <= kPlannedByEach)
    make_plan<C::kBlockK, C::kThreads>(a.p, a.plan, a.group, &shared.pages[0][0][0]);
  const Runs runs(a.plan, a.p.heads_k);
  const int begin = runs.begin(blockIdx.x), end = runs.begin(blockIdx.x + 1);
  if (begin >= end) return;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp == 4)
    load<C>(shared, a, Cursor(a.plan, runs, begin, end));
  else if (warp == 5)
    load_queries<C>(shared, a, Cursor(a.plan, runs, begin, end));
  else
    compute<Op, C>(shared, a, begin, end);
}

}  // namespace flashsci::sm90::paged
