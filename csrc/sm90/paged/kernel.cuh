// Paged attention for few queries of each sequence, Hopper: decoding from a paged KV cache, of the
// dtype of the queries or of 8-bit floats.
//
// Maths     That of fwd/kernel.cuh; a sink adds one logit to each row's sum. 8-bit floats are widened
//           to fp16, and Q and P are fp16 there whatever the dtype of the call is (queries.cuh);
//           their scales multiply scores and output in fp32.
// Work      Rows are (query, head of the group) pairs, 64 to a tile, so that a sequence that decodes
//           reads its keys once for all heads that share them. plan.cuh finds the tiles and the
//           blocks of keys that each sees, from lengths on the device; the blocks of all tiles in a
//           row, for one head after the other, are cut into equal runs, one for each CTA, and
//           combine_kernel puts together what was cut.
// Roles     Warps 0 - 7 compute, each with mma.sync on 16 rows and its own keys: with 16 rows at
//           most an eighth of them, with 64 a half. Warp 8 loads K, warp 9 V, warp 10 finds what
//           tile is next and loads its Q, warp 11 puts tiles of few rows together.
// Shared    Two tiles of Q (one at head dim 256), a ring of K and V [stage][kColumns][kBlockK rows] in
//           swizzled boxes, and the warps' sums at the end of a tile: `Storage`.
// Pages     A lane of a loading warp looks up the page of the rows that it copies, some blocks ahead.
//           A copy takes as many rows as pages and blocks have in common, 16 at least.
// Limits    Memory. Prompts are right, but slow.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../core/poison.cuh"
#include "gather.cuh"
#include "load.cuh"
#include "plan.cuh"

namespace flashsci::sm90::paged {

template <class Op, class Format, class C>
__device__ __forceinline__ void compute(Storage<C>& shared, const Args& a, int warp) {
  uint32_t turn = 0, tiles = 0, handed = 0;
  for (bool more = true; more; ++tiles) {
    const uint32_t stage = tiles % C::kQStages;
    ptx::mbarrier_wait(ptx::shared_address(&shared.q_full[stage]), tiles / C::kQStages & 1);
    const Rows rows(a, shared.tiles[stage]);
    const float v_scale = shared.v_scale[stage];
    Part<Op, Format, C> part(shared, a, rows, stage, warp);
    part.run(turn);
    part.release(shared.q_empty[stage]);  // and of what is there beside Q, which was copied
    // What was left before has been read.
    ptx::mbarrier_wait(ptx::shared_address(&shared.sums_empty), (handed & 1) ^ 1);
    more = rows.tile.more;
    if (rows.rows > C::kFewRows || (!more && !C::kSharesLast)) {
      gather(part, v_scale);
    } else if (!more) {
      gather_few(part, v_scale);
    } else {
      leave_all(part);
      part.release(shared.sums_full);
      ++handed;
    }
  }
}

// Of a CTA that has no block.
__device__ __forceinline__ void leave_no_cut(const Plan& plan) {
  if (threadIdx.x == 0) plan.cuts[blockIdx.x].last = -1;
}

template <class Op, class Format, class C>
__global__ void __launch_bounds__(C::kBound, 1) paged_kernel(const __grid_constant__ Args a) {
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
      ptx::mbarrier_init(ptx::shared_address(&shared.k_empty[stage]), kWarps);
      ptx::mbarrier_init(ptx::shared_address(&shared.v_empty[stage]), kWarps);
    }
    for (int stage = 0; stage < C::kQStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.q_full[stage]), 32);
      ptx::mbarrier_init(ptx::shared_address(&shared.q_empty[stage]), kWarps + 1);
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.sums_full), kWarps);
    ptx::mbarrier_init(ptx::shared_address(&shared.sums_empty), 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();  // the plan
  Runs runs(0, 0, 0);
  static_assert(sizeof(shared.pages) >= sizeof(Planning<C::kThreads>));
  auto& planning = *reinterpret_cast<Planning<C::kThreads>*>(&shared.pages);
  const Start start =
      a.plan.count <= kPlannedByEach ? plan_and_begin<C>(a, runs, planning) : begin_of(a, runs);
  const int begin = runs.begin(blockIdx.x), end = runs.begin(blockIdx.x + 1);
  if (begin >= end) return leave_no_cut(a.plan);
  const Cursor cursor(a.plan, runs, begin, end, start);
  if (cursor.done()) return leave_no_cut(a.plan);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp < kWarps) {
    ptx::setmaxnreg_inc<C::kComputingRegisters>();
    compute<Op, Format, C>(shared, a, warp);
  } else {
    ptx::setmaxnreg_dec<C::kLoadingRegisters>();
    if (warp == kWarps) load<C, kKeys>(shared, a, cursor);
    if (warp == kWarps + 1) load<C, kValues>(shared, a, cursor);
    if (warp == kWarps + 2) load_queries<Op, C>(shared, a, cursor);
    if (warp == kWarps + 3) merge<Op, C>(shared, a, runs);
  }
}

}  // namespace flashsci::sm90::paged
