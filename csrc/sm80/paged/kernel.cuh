// Paged attention for few queries of each sequence on tensor cores of the mma.sync generation: decoding
// from a paged KV cache, of the dtype of the queries or of 8-bit floats.
//
// Maths     That of sm90/paged/kernel.cuh. 8-bit floats become fp16 by moving their bits (format.cuh).
// Work      As there: core/paged/plan.cuh, and combine.cuh for cut tiles.
// Roles     Warps 0 - 7 compute (core/paged/part.cuh), warp 8 loads K, warp 9 V, each by cp.async,
//           warp 10 finds the next tile and loads its Q, warp 11 merges tiles of few rows.
// Shared    Two tiles of Q (one at head dim 256), the warps' sums, and a ring of K and V with the
//           number of stages that the device has room for: `Storage`.
// Pages     A lane looks up the page of 16 rows, some blocks ahead.
// Limits    Memory. Prompts are right, but slow.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../core/paged/compute.cuh"
#include "../../core/paged/load_q.cuh"
#include "../../core/poison.cuh"
#include "load.cuh"

namespace flashsci::sm80::paged {

template <class Op, class Format, class C>
__global__ void __launch_bounds__(kThreads, 1) paged_kernel(const __grid_constant__ Args a) {
  extern __shared__ unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<Storage<C>*>(shared_memory);
  poison_block(&shared, shared_bytes<C>(a.stages));
  if (threadIdx.x == 0) init_barriers(shared, a.stages, 32);
  __syncthreads();
  for_run(shared, a, [&](const Cursor& cursor, const Runs& runs) {
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    switch (warp - kWarps) {
      case kLoadsKeys:
        return load<C, kLoadsKeys>(shared, a, cursor);
      case kLoadsValues:
        return load<C, kLoadsValues>(shared, a, cursor);
      case kLoadsQueries:
        return load_queries<Op, C>(shared, a, cursor);
      case kMerges:
        return merge<Op, C>(shared, a, runs);
      default:
        return compute<Op, Format, C>(shared, a, warp);
    }
  });
}

}  // namespace flashsci::sm80::paged
