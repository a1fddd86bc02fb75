// Backward attention for Hopper: TMA, WGMMA, warp specialisation.
//
// Maths     p_ij = exp(s_ij - lse_i), dp_ij = do_i v_j, ds_ij = p_ij (dp_ij - delta_i), delta_i =
//           o_i do_i - dlse_i; dv_j = sum_i p_ij do_i, dk_j = scale sum_i ds_ij q_i, dq_i = scale
//           sum_j ds_ij k_j. Softcap: ds times its slope.
// Roles     A tile is 128 keys of one head, with all query heads that share it. A CTA on every SM
//           takes tile after tile until none is left, or (with a bias, or long sequences of wide
//           heads) each CTA has one. Warpgroup 0 copies (load.cuh): warp 0 takes tiles and loads,
//           warps 1 and 2 add dQ to global memory. Warpgroups 1 and 2 own 64 keys each
//           (mainloop.cuh). Kernels before and after it: preprocess.cuh, postprocess.cuh. Head dims
//           beyond 128: a cluster of two CTAs has a tile (config_d256.cuh).
// Shared    K, V; Q, dO, lse, delta [2 stages] and dS [2 stages] in 128-byte swizzled boxes; dQ of
//           each consumer in fp32: `BackwardStorage` (config.cuh). In CTAs with many tiles dV and
//           dK leave through dS and dQ, while K and V of the next tile arrive.
// Pipeline  In a consumer: S^T and dP^T into registers, P^T and dS^T from there into dV and dK. dS
//           goes through shared memory to both consumers for dQ; each computes half of dQ, a block
//           late. So consumers wait little for each other, and the exponentials of one overlap the
//           products of the other.
// Limits    docs/develop/kernels/sm90_backward.md.
#pragma once
#include <cuda_runtime.h>

#include "../../core/poison.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/fence.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/warpgroup.cuh"
#include "bias_aliased.cuh"
#include "config.cuh"
#include "config_d256.cuh"
#include "load.cuh"
#include "mainloop.cuh"
#include "mainloop_d256.cuh"
#include "store_dq.cuh"
#include "store_dq_d256.cuh"

namespace flashsci::sm90::bwd {

template <class Op, class C, bool kVarlen, bool kSoftcap>
__global__ void __launch_bounds__(C::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArgs a) {
  extern __shared__ unsigned char shared_memory[];
  // Aligned by hand, except with pairs, where every byte counts: those rely on the system, which
  // aligns dynamic shared memory to 1024 in kernels without static shared memory.
  const uint32_t skipped = C::kHasBiasMask ? 0 : -ptx::shared_address(shared_memory) & 1023u;
  auto& shared = *reinterpret_cast<BackwardStorage<C>*>(shared_memory + skipped);
  poison_block(&shared, sizeof(shared));
  ptx::launch_dependents();
  if constexpr (!C::kManyTiles) {
    const KeyTile tile = find_key_tile<C, kVarlen>(a, blockIdx.x / C::kCtas);
    if (tile.row < 0) {
      ptx::wait_for_prerequisites();  // or the next kernel would not wait for the first
      return;
    }
    if (threadIdx.x == 0) shared.tile[0] = tile;
  }
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, uint32_t count) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), count);
    };
    if constexpr (C::kManyTiles) {
      shared.queue.tiles = shared.queue.blocks = 0;
      init(shared.queue.kv_empty, 4 * C::kConsumers);
      for (int i = 0; i < 2; ++i) {
        init(shared.queue.tile_full[i], 1);
        init(shared.queue.tile_empty[i], 4 * C::kConsumers + C::kConsumers);
      }
    }
    init(shared.kv_full, 1);
    if constexpr (C::kD256) {
      for (int i = 0; i < C::kDsStages; ++i) {
        init(shared.ds_full[i], 4);
        init(shared.peer_ds_full[i], 1);
        init(shared.ds_empty[i], 4 * C::kConsumers * C::kCtas);
      }
      init(shared.p_full, 4);
      init(shared.p_empty, 4);
      init(shared.met, 4 * C::kConsumers);
    } else {
      init(shared.ds_full, 4 * C::kConsumers);
    }
    for (int i = 0; i < C::kStages; ++i) {
      init(shared.q_full[i], 1);
      init(shared.q_empty[i], 4 * C::kConsumers);
      if (i >= C::kDoutStages) continue;
      init(shared.dout_full[i], 1);
      init(shared.dout_empty[i], 4 * C::kConsumers);
    }
    for (int w = 0; w < C::kConsumers; ++w) {
      for (int i = 0; i < C::kDqStages; ++i) {
        init(shared.dq_full[i][w], 4);
        init(shared.dq_empty[i][w], 1);
      }
    }
    if constexpr (C::kHasBiasMask) {
      for (int i = 0; i < C::kDsStages; ++i) {
        init(shared.bias_full[i], 1);
        init(shared.ds_done[i], 4 * C::kConsumers);
      }
    }
    ptx::mbarrier_init_fence();
  }
  if constexpr (C::kD256) {
    // dS before the first block, of both CTAs.
    for (int i = threadIdx.x * 16; i < 2 * C::kDsBytes; i += C::kThreads * 16)
      ptx::st_shared(ptx::shared_address(shared.ds[0]) + i, make_uint4(0, 0, 0, 0));
    ptx::fence_proxy_async();
    ptx::cluster_sync();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) {
      if constexpr (C::kManyTiles) {
        load_tiles<C, kVarlen>(shared, a);
      } else if (ptx::elect()) {
        load_tile<C, kVarlen>(shared, a, shared.tile[0], 0);
      }
    } else if (warp <= C::kConsumers) {
      if (ptx::elect()) {
        if constexpr (C::kD256)
          add_dq_d256<C, kVarlen>(shared, a, shared.tile[0], warp - 1);
        else
          add_dq<C, kVarlen>(shared, a, warp - 1);
      }
    } else if constexpr (C::kHasBiasMask) {
      if (ptx::elect()) {
        if constexpr (C::kBiasStaged)
          move_staged_bias_mask<C>(shared, a, shared.tile[0]);
        else
          move_bias_mask<C>(shared, a, shared.tile[0]);
      }
    }
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    if constexpr (C::kD256) {
      if (warpgroup == 1)
        consume_d256<Op, C, kVarlen, kSoftcap, 0>(shared, a);
      else
        consume_d256<Op, C, kVarlen, kSoftcap, 1>(shared, a);
    } else {
      consume<Op, C, kVarlen, kSoftcap>(shared, a, warpgroup - 1);
    }
  }
  if constexpr (C::kCtas > 1) {
    __syncwarp();
    ptx::cluster_sync();  // the other CTA may still arrive at barriers of this one
  }
}

}  // namespace flashsci::sm90::bwd
