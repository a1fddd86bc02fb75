// Forward attention for Hopper on 8-bit floats: TMA, QGMMA, warp specialisation, sums of two levels.
//
// Maths     The forward's (../fwd/kernel.cuh) for q, k, v in e4m3, each with fp32 scales per
//           tensor, per head or per block of rows. P = 256 e^(s - m) is rounded to e4m3. The row
//           sum, and so lse, is that of the rounded P: a column of P V, since transposed V has a
//           row of ones. Tensor cores keep 14 bits of a sum of 8-bit products: P V of a block of 64
//           or 128 keys goes to separate registers, and from there, times the scale of its values,
//           to the output in fp32. q k^T likewise, 128 columns at a time. Fast calls leave P V of
//           all blocks, and all of q k^T, to the tensor core (Tiling::kFast).
// Roles     Persistent CTAs, one per SM, walk a list of query tiles (../fwd/scheduler.cuh).
//           Warpgroup 0 loads: its warp 1 plans the tiles and loads Q, warp 0 K and V (load.cuh),
//           warps 2 and 3 transpose V (transpose.cuh). Warpgroups 1 .. kConsumers own 64 query rows
//           each, from S to the stores (mainloop.cuh).
// Shared    Q [stage][consumer][columns][64 rows], K and V [stage][columns][kBlockK rows] in TMA
//           boxes, transposed V [stage][kHeadDimV + 8 rows][kBlockK keys], output staging of every
//           warp, barriers, published tiles: `Storage` (config.cuh).
// Pipeline  In a consumer, right to left: S = Q K^T, softmax, P V, its sum. The other consumers'
//           products run during its softmax. Scheduler, producer and transposing warps run ahead
//           across tiles. The consumers take turns at products, so that they are not all at the
//           same step.
// Limits    Instruction issue, exponentials and power: docs/develop/kernels/sm90_fp8.md.
#pragma once
#include <cuda_runtime.h>

#include "../../core/poison.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"
#include "load.cuh"
#include "mainloop.cuh"
#include "transpose.cuh"

namespace flashsci::sm90::fp8 {

template <class C>
__device__ __forceinline__ void init_barriers(Storage<C>& shared) {
  const auto init = [](uint64_t& barrier, uint32_t count) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), count);
  };
  for (int stage = 0; stage < C::kQStages; ++stage)
    for (int w = 0; w < C::kConsumers; ++w) {
      init(shared.q_full[stage][w], 1);
      // Warps that read data published with Q take part in the first.
      init(shared.q_empty[stage][w], 4 + (w == 0 ? 1 + C::kTransposers : 0));
    }
  for (int i = 0; i < kTileSlots; ++i) init(shared.tile_ready[i], 1);
  for (int stage = 0; stage < C::kStages; ++stage) {
    init(shared.k_full[stage], 1);
    init(shared.k_empty[stage], 4 * C::kConsumers);
    for (int part = 0; part < C::kVParts && stage < C::kVStages; ++part) {
      init(shared.v_full[stage][part], 1);
      init(shared.v_empty[stage][part], C::kTransposers);
    }
    init(shared.turned_full[stage], C::kTransposers);
    init(shared.turned_empty[stage], 4 * C::kConsumers);
  }
  ptx::mbarrier_init_fence();
}

template <class C, bool kVarlen>
__global__ void __launch_bounds__(C::kThreads, 1)
    fp8_forward_kernel(const __grid_constant__ Args a) {
  extern __shared__ unsigned char shared_memory[];
  auto& shared =
      *reinterpret_cast<Storage<C>*>(shared_memory + (-ptx::shared_address(shared_memory) & 1023u));
  poison_block(&shared, sizeof(shared));
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&a.q);
    ptx::prefetch_tensor_map(&a.k);
    ptx::prefetch_tensor_map(&a.v);
    init_barriers(shared);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    static_assert(C::kTransposers == 2, "the warps of the first warpgroup");
    if (warp == 0) {
      if (ptx::elect()) load_kv<C, kVarlen>(shared, a);
    } else if (warp == 1) {
      schedule_tiles<C, kVarlen>(shared, a);
    } else {
      turn_v<C, kVarlen>(shared, a, warp - 2);
    }
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    Consumer<C, kVarlen>(shared, a, warpgroup - 1).run();
  }
}

}  // namespace flashsci::sm90::fp8
