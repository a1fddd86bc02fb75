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
    if (rows.tile.block == rows.tile.last) break;
    Part<Op, Format, C> part(shared, a, rows, stage, warp);
    part.run(turn);
    // Read again: registers are few until now.
    const Rows again(a, shared.tiles[stage]);
    const Writer<Op, C> writer(a, again, shared.v_scale[stage]);
    part.release(shared.q_empty[stage]);
    // What was left before has been read.
    ptx::mbarrier_wait(ptx::shared_address(&shared.sums_empty), (handed & 1) ^ 1);
    more = again.tile.more;
    if (again.rows > C::kFewRows || (!more && !C::kSharesLast)) {
      gather(part, writer);
    } else if (!more) {
      gather_few(part, writer);
    } else {
      leave_all(part);
      part.release(shared.sums_full);
      ++handed;
    }
  }
}

template <class Op, class Format, class C>
__global__ void __maxnreg__(C::kRegisters) paged_kernel(const __grid_constant__ Args a) {
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
    ptx::mbarrier_init(ptx::shared_address(&shared.item_full), 32);
    ptx::mbarrier_init(ptx::shared_address(&shared.item_empty), 2);
    ptx::mbarrier_init(ptx::shared_address(&shared.sums_full), kWarps);
    ptx::mbarrier_init(ptx::shared_address(&shared.sums_empty), 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();  // the plan
  Runs runs(0, 1, 1, false);
  if (a.plan.count <= kPlannedByEach) {
    static_assert(sizeof(shared.pages) >= C::kThreads / 32 * sizeof(int));
    runs = plan_and_begin<C>(a, shared.item,
                             reinterpret_cast<int (&)[C::kThreads / 32]>(shared.pages));
  } else {
    runs = runs_of(a);
    if (threadIdx.x < 32) {
      const Item item = find_item(a.plan, runs, runs.number(blockIdx.x));
      if (threadIdx.x == 0) shared.item = item;
    }
    __syncthreads();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) begin_count(a.plan, runs);
  const Item& first = shared.item;
  const bool any = first.begin < first.end;
  const bool blocks = any && (first.unit != 0 || first.begin + 1 < first.end);
  __syncthreads();  // afterwards another item may be there
  if (!blocks) {
    if (any && threadIdx.x == 0) a.plan.cuts[first.number].last = -1;
    return;
  }
  const bool more = runs.rest > 0;  // items, which no CTA has yet
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp < kWarps) {
    ptx::setmaxnreg_inc<C::kComputingRegisters>();
    compute<Op, Format, C>(shared, a, warp);
  } else {
    ptx::setmaxnreg_dec<C::kLoadingRegisters>();
    if (warp == kWarps) load<C, kKeys>(shared, a, more);
    if (warp == kWarps + 1) load<C, kValues>(shared, a, more);
    if (warp == kWarps + 2) load_queries<Op, C>(shared, a, more);
    if (warp == kWarps + 3) merge<Op, C>(shared, a);
  }
}

}  // namespace flashsci::sm90::paged
