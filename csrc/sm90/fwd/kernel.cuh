// Forward attention for Hopper: TMA, WGMMA, warp specialisation.
//
// Maths     o_i = sum_j p_ij v_j / l_i, p_ij = exp(s_ij - m_i), l_i = sum_j p_ij,
//           lse_i = m_i + log l_i, s = scale q k^T or softcap tanh(scale q k^T / softcap), over the
//           keys the window shows.
// Roles     Persistent CTAs, one per SM, walk a list of query tiles (scheduler.cuh). Warpgroup 0
//           loads (load.cuh): its warp 1 plans the tiles and loads Q, warp 0 K and V, warp 2 bias
//           and mask (load_bias_mask.cuh). Warpgroups 1 .. kConsumers own 64 query rows each, from
//           S to the stores (mainloop.cuh).
// Shared    Q [stage][consumer][64 columns][64 rows], K and V [stage][64 columns][kBlockK rows] in
//           128-byte swizzled boxes, output staging of every warp, barriers, published tiles:
//           `SharedStorage` (config.cuh).
// Pipeline  In a consumer, right to left: S_n = Q K_n^T and O += P_n+1 V_n+1 are issued together
//           and softmax of S_n runs during the second, across tiles too. The consumers take turns
//           at issuing (named barriers), so that one's softmax hides behind the products of the
//           others. Scheduler and producer run ahead across tiles.
// Limits    Tensor cores and power at D 256 and 128, and instruction issue as well at D 64:
//           docs/develop/kernels/sm90_forward.md.
#pragma once
#include <cuda_runtime.h>

#include "../../core/poison.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"
#include "load.cuh"
#include "load_and_schedule.cuh"
#include "load_bias_mask.cuh"
#include "mainloop.cuh"

namespace flashsci::sm90::fwd {

template <class Op, class C, bool kWindowed, bool kPlainScores, bool kVarlen>
__global__ void __launch_bounds__(C::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArgs a) {
  extern __shared__ unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<C>*>(
      shared_memory + (-ptx::shared_address(shared_memory) & 1023u));
  poison_block(&shared, sizeof(shared));
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&a.q);
    ptx::prefetch_tensor_map(&a.k);
    ptx::prefetch_tensor_map(&a.v);
    for (int i = 0; i < C::kQStages * C::kConsumers; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.q_full[0][0] + i), 1);
      // Producers take part in the first, since they read the record that is published with Q.
      const int readers = C::kQStages > 1 && i % C::kConsumers == 0 ? 1 + C::kHasBiasMask : 0;
      ptx::mbarrier_init(ptx::shared_address(&shared.q_empty[0][0] + i), 4 + readers);
    }
    for (int i = 0; i < kTileSlots; ++i)
      ptx::mbarrier_init(ptx::shared_address(&shared.tile_ready[i]), 1);
    for (int stage = 0; stage < C::kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.k_full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.v_full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.k_empty[stage]), 4 * C::kConsumers);
      ptx::mbarrier_init(ptx::shared_address(&shared.v_empty[stage]), 4 * C::kConsumers);
    }
    if constexpr (C::kHasBiasMask) {
      for (int stage = 0; stage < kBiasMaskStages; ++stage) {
        ptx::mbarrier_init(ptx::shared_address(&shared.bias_mask_full[stage]), 1);
        ptx::mbarrier_init(ptx::shared_address(&shared.bias_mask_empty[stage]), 4 * C::kConsumers);
      }
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if constexpr (C::kQStages == 1) {
      if (warp == 0) load_and_schedule<C, kVarlen>(shared, a);
    } else {
      if (warp == 1) schedule_tiles<C, kVarlen>(shared, a);
      if (warp == 0 && ptx::elect()) load_kv<C, kVarlen>(shared, a);
      if constexpr (C::kHasBiasMask) {
        if (warp == 2 && ptx::elect()) stream_bias_mask<C>(shared, a);
      }
    }
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    consume<Op, C, kWindowed, kPlainScores, kVarlen>(shared, a, warpgroup - 1);
  }
}

}  // namespace flashsci::sm90::fwd
