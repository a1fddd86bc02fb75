// The kernel before the products of the Turing backward: the statistics of each query row.
//
// Maths     statistics_i = (-lse_i log2(e), -delta_i), delta_i = sum_d dout_id out_id - dlse_i.
// Roles     A row is read by 4 to 16 lanes, 16 bytes each.
// Shared    None.
// Pipeline  None: enough CTAs.
// Limits    Memory.
#pragma once
#include "../../core/row_statistics.cuh"
#include "config.cuh"

namespace flashsci::sm75::bwd {

template <class Op>
__global__ void __launch_bounds__(kRowThreads, 4)
    statistics_kernel(const __grid_constant__ FlashsciBackwardParams p,
                      const __grid_constant__ BackwardPlan plan, uint32_t tiles, int lanes,
                      int vector) {
  find_statistics<Op>(p, plan, tiles, lanes, vector);
}

}  // namespace flashsci::sm75::bwd
