// Paged attention for few queries of each sequence, Hopper: decoding from a paged KV cache, of the
// dtype of the queries or of 8-bit floats.
//
// Maths     That of fwd/kernel.cuh; a sink adds one logit to each row's sum. 8-bit floats are widened
//           to fp16, and Q and P are then fp16 for calls of any dtype (queries.cuh);
//           their scales multiply scores and output in fp32.
// Work      Rows are (query, head of the group) pairs, 64 per tile, so that a decoding sequence
//           reads its keys once for all heads that share them. plan.cuh finds the tiles and the
//           blocks of keys that each sees, from lengths on the device. The blocks of all tiles in a
//           row, for one head after the other, are cut into equal runs, one for each CTA, and
//           combine_kernel combines the pieces of cut tiles.
// Roles     Warps 0 - 7 compute, each with mma.sync on 16 rows and its own keys: an eighth of them
//           for 16 rows or fewer, a half for 64. Warp 8 loads K, warp 9 V, warp 10 finds the next
//           tile and loads its Q, warp 11 merges tiles of few rows.
// Shared    Two tiles of Q (one at head dim 256), a ring of K and V [stage][kColumns][kBlockK rows] in
//           swizzled boxes, and the warps' sums at the end of a tile: `Storage`.
// Pages     A lane of a loading warp looks up the page of the rows that it copies, some blocks ahead.
//           A copy takes the rows that pages and blocks have in common, 16 at least.
// Limits    Memory. Prompts are right, but slow.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../core/paged/compute.cuh"
#include "../../core/paged/load_q.cuh"
#include "../../core/poison.cuh"
#include "load.cuh"

namespace flashsci::sm90::paged {

template <class Op, class Format, class C>
__global__ void __launch_bounds__(C::kBound, 1) paged_kernel(const __grid_constant__ MappedArgs a) {
  extern __shared__ unsigned char shared_memory[];
  auto& shared =
      *reinterpret_cast<Storage<C>*>(shared_memory + (-ptx::shared_address(shared_memory) & 1023u));
  poison_block(&shared, sizeof(shared));
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&a.k);
    ptx::prefetch_tensor_map(&a.v);
    init_barriers(shared, C::kStages, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  C::Isa::wait_for_prerequisites();  // the plan, or the previous kernel in the stream
  // Only now: combine_kernel writes before it waits for this kernel.
  C::Isa::launch_dependents();
  for_run(shared, a, [&](const Cursor& cursor, const Runs& runs) {
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp < kWarps) {
      ptx::setmaxnreg_inc<C::kComputingRegisters>();
      compute<Op, Format, C>(shared, a, warp);
    } else {
      ptx::setmaxnreg_dec<C::kLoadingRegisters>();
      if (warp == kWarps + kLoadsKeys)
        load<C, kLoadsKeys>(shared, a, runs, cursor);
      else if (warp == kWarps + kLoadsValues)
        load<C, kLoadsValues>(shared, a, runs, cursor);
      else if (warp == kWarps + kLoadsQueries)
        load_queries<Op, C>(shared, a, cursor);
      else
        merge<Op, C>(shared, a, runs);
    }
  });
}

}  // namespace flashsci::sm90::paged
