// Triangle attention for Hopper: many members of a batch share the bias of their scores.
//
// Maths     o_i = sum_j p_ij v_j / l_i, p_ij = exp(s_ij - m_i), l_i = sum_j p_ij,
//           lse_i = m_i + log l_i, s = scale q k^T + bias, over the keys that the member's mask
//           shows.
// Roles     Persistent CTAs, one per SM, take runs of units: a tile of 64 or 128 query rows of a
//           head, of four or two members (config.cuh). Warpgroup 0 loads (load.cuh), a warp for
//           each member. Warpgroups 1 .. 4 own 64 rows of a member each, from S to the stores
//           (mainloop.cuh); they never wait for one another.
// Shared    Bias: six blocks of 64 keys for all consumers, which stay from unit to unit if there
//           are no more. K and V: a ring of blocks of 64 keys for each member. Q and output of
//           every consumer. Rows of K, V, Q and out have 64 bytes: `SharedStorage` (config.cuh).
// Pipeline  The accumulator of a block starts from the bias: S = bias / scale + Q K^T needs no
//           addition. A consumer reads the next bias during P V; the products of one consumer run
//           during the exponentials of the other three. Blocks that a member's mask hides are
//           neither loaded nor computed.
// Limits    Exponentials and issue slots: docs/develop/kernels/sm90_triangle_forward.md.
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

namespace flashsci::sm90::triangle_fwd {

template <class C>
__device__ __forceinline__ void init_barriers(SharedStorage<C>& shared) {
  for (int i = 0; i < C::kMembers * C::kStages; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&shared.kv_full[0][0] + i), 1);
    ptx::mbarrier_init(ptx::shared_address(&shared.kv_empty[0][0] + i), 4 * C::kRowTiles);
  }
  for (int i = 0; i < C::kBiasStages; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&shared.bias_full[i]), 1);
    ptx::mbarrier_init(ptx::shared_address(&shared.bias_prepared[i]), 4);
    ptx::mbarrier_init(ptx::shared_address(&shared.bias_empty[i]), 4 * C::kConsumers);
  }
  for (int i = 0; i < C::kConsumers; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&shared.q_full[i]), 1);
    ptx::mbarrier_init(ptx::shared_address(&shared.q_empty[i]), 4);
  }
  ptx::mbarrier_init_fence();
}

template <class Op, class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    triangle_forward_kernel(const __grid_constant__ Args a) {
  extern __shared__ unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<C>*>(
      shared_memory + (-ptx::shared_address(shared_memory) & 1023u));
  poison_block(&shared, sizeof(shared));
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&a.q);
    ptx::prefetch_tensor_map(&a.k);
    ptx::prefetch_tensor_map(&a.v);
    ptx::prefetch_tensor_map(&a.bias);
    init_barriers(shared);
  }
  // The kernel that copies the bias started after all earlier kernels had ended: only its own
  // writes need a wait (load.cuh).
  if (a.plan.bias_copied == 0) ptx::wait_for_prerequisites();
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp < C::kMembers) produce<C>(shared, a, warp);
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    Consumer<Op, C>(shared, a, warpgroup - 1).run();
  }
}

}  // namespace flashsci::sm90::triangle_fwd
