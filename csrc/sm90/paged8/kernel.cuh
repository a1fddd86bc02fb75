// Paged attention from a cache of 8-bit floats, for few queries of each sequence, Hopper.
//
// Maths     That of paged/kernel.cuh. K and V are widened to fp16, which is exact; so Q and P are
//           fp16, too, whatever the dtype of the call is (queries.cuh). Scales multiply scores and
//           output in fp32.
// Work      That of paged/kernel.cuh: its plan, its runs, its last kernel.
// Roles     Warps 0 - 7 compute, each with mma.sync on 16 rows and its own keys of every block:
//           with 16 rows at most an eighth of them, with 64 a half. Warp 8 loads K, warp 9 V, warp
//           10 finds what tile is next and loads its Q.
// Shared    Two tiles of Q (one at head dim 256), a ring of K and V as bytes [stage][kColumns][128
//           rows] in swizzled boxes, and the warps' sums at the end of a tile: `Storage`.
// Limits    Memory. Prompts are right, but slow.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../core/poison.cuh"
#include "../paged/load.cuh"
#include "../paged/plan.cuh"
#include "gather.cuh"

namespace flashsci::sm90::paged8 {

template <class Op, class Format, class C>
__device__ __forceinline__ void compute(Storage<C>& shared, const Args& args, int warp, int begin,
                                        int end) {
  uint32_t turn = 0, tiles = 0;
  for (int at = begin; at < end; ++tiles) {
    const uint32_t stage = tiles % C::kQStages;
    ptx::mbarrier_wait(ptx::shared_address(&shared.q_full[stage]), tiles / C::kQStages & 1);
    const Rows rows(args.call, shared.tiles[stage]);
    const float v_scale = shared.v_scale[stage];
    Part<Op, Format, C> part(shared, args, rows, stage, warp);
    part.run(turn);
    part.release(shared.q_empty[stage]);  // and of what is there beside Q, which was copied
    const Tile& tile = rows.tile;
    gather(part, v_scale, tile.block == 0 && tile.last == tile.slot.blocks,
           paged::piece_of(blockIdx.x, tile.begin >= begin));
    at += tile.last - tile.block;
  }
}

template <class Op, class Format, class C>
__global__ void __launch_bounds__(C::kThreads, 1) paged8_kernel(const __grid_constant__ Args args) {
  extern __shared__ unsigned char shared_memory[];
  auto& shared =
      *reinterpret_cast<Storage<C>*>(shared_memory + (-ptx::shared_address(shared_memory) & 1023u));
  poison_block(&shared, sizeof(shared));
  const paged::Args& a = args.call;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&a.k);
    ptx::prefetch_tensor_map(&a.v);
    for (int stage = 0; stage < C::kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.k_full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.v_full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.k_empty[stage]), kWarps);
      ptx::mbarrier_init(ptx::shared_address(&shared.v_empty[stage]), kWarps);
    }
    for (int stage = 0; stage < C::kQStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.q_full[stage]), 32);
      ptx::mbarrier_init(ptx::shared_address(&shared.q_empty[stage]), kWarps);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();  // the plan
  if (a.plan.count <= paged::kPlannedByEach)
    paged::make_plan<C::kBlockK, C::kThreads>(a.p, a.plan, a.group, &shared.pages[0][0][0]);
  const Runs runs(a.plan, a.p.heads_k);
  const int begin = runs.begin(blockIdx.x), end = runs.begin(blockIdx.x + 1);
  if (begin >= end) return;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp < kWarps) {
    ptx::setmaxnreg_inc<C::kComputingRegisters>();
    compute<Op, Format, C>(shared, args, warp, begin, end);
  } else {
    ptx::setmaxnreg_dec<C::kLoadingRegisters>();
    if (warp > kWarps + 2) return;
    const Cursor cursor(a.plan, runs, begin, end);
    if (warp == kWarps) paged::load<C, paged::kKeys>(shared, a, cursor);
    if (warp == kWarps + 1) paged::load<C, paged::kValues>(shared, a, cursor);
    if (warp == kWarps + 2) load_queries<Op, C>(shared, args, cursor);
  }
}

}  // namespace flashsci::sm90::paged8
