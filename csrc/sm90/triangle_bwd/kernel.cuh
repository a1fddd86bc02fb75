// Backward of attention whose bias many batch members share (triangle attention), for Hopper: TMA,
// WGMMA, warp specialisation, the bias's gradient summed in registers.
//
// Maths     As in ../bwd/kernel.cuh with a bias; dbias = the sum of dS over the members.
// Roles     An owner is a (batch, head) with a separate bias. A CTA has 64 keys and up to 384
//           queries of it and walks over its group's members; the groups share all (owner, member)
//           equally, and the CTAs of a group run at the same time. Warpgroup 0 copies: warp 0 loads
//           (load.cuh), warps 1 and 2 add dQ to global memory, warp 3 sums dK and dV of both
//           consumers and stores them (store.cuh). Warpgroups 1 and 2 have every other block of 64
//           queries each (mainloop.cuh). Kernels before and after it: preprocess.cuh,
//           postprocess.cuh.
// Shared    The bias in fp32, K, V [2 members], Q, dO and statistics [2 stages for each consumer],
//           dS, dQ, dK and dV of each consumer: `TriangleStorage` (config.cuh). dbias: registers.
// Pipeline  Consumers share only the keys; S^T of the next step is computed during dQ and dK of
//           this.
// Limits    docs/develop/kernels/sm90_triangle_backward.md.
#pragma once
#include <cuda_runtime.h>

#include "../../core/poison.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"
#include "load.cuh"
#include "mainloop.cuh"
#include "store.cuh"

namespace flashsci::sm90::triangle_bwd {

template <class C>
__device__ __forceinline__ void init_barriers(TriangleStorage<C>& shared) {
  const auto init = [](uint64_t& barrier, uint32_t count) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), count);
  };
  for (int i = 0; i < 2; ++i) {
    init(shared.member_full[i], 1);
    init(shared.member_empty[i], 4 * kConsumers + kConsumers + 1);
  }
  for (int w = 0; w < kConsumers; ++w) {
    for (int i = 0; i < kStages; ++i) {
      init(shared.q_full[w][i], 1);
      init(shared.q_empty[w][i], 4);
    }
    init(shared.ds_empty[w], 4);
    init(shared.dq_full[w], 4);
    init(shared.dq_empty[w], 1);
  }
  init(shared.sums_full, 4 * kConsumers);
  init(shared.sums_empty, 1);
  ptx::mbarrier_init_fence();
}

template <class Op, class C>
__global__ void __launch_bounds__(kThreads, 1)
    triangle_backward_kernel(const __grid_constant__ TriangleArgs a) {
  extern __shared__ unsigned char shared_memory[];
  const uint32_t skipped = -ptx::shared_address(shared_memory) & 1023u;
  auto& shared = *reinterpret_cast<TriangleStorage<C>*>(shared_memory + skipped);
  poison_block(&shared, sizeof(shared));
  ptx::launch_dependents();
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) {
      load_members(shared, a);
    } else if (warp <= kConsumers) {
      if (ptx::elect()) add_dq(shared, a, warp - 1);
    } else {
      store_dk_dv<Op>(shared, a);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume<Op>(shared, a, warpgroup - 1);
  }
}

}  // namespace flashsci::sm90::triangle_bwd
