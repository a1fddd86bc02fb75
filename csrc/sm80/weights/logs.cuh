// Key weights as a bias: the logarithm of each weight, for the kernels of csrc/sm80 that compute
// out, lse, dq, dk and dv.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../../core/dbias_reduce.cuh"
#include "../../core/launch.cuh"
#include "../../include/flashsci.h"
#include "../../include/flashsci_small.h"
#include "../../include/flashsci_weights.h"

namespace flashsci::sm80::weights {

inline bool has_weights(const FlashsciBiasMask& p) {
  return p.bias_is_fp32 == FLASHSCI_KEY_WEIGHTS;
}

// A weight as it counts: 0 if it is subnormal, since 1 / weight would exceed fp32.
__device__ __forceinline__ float counted(float weight) {
  return fabsf(weight) < 0x1p-126f ? 0.f : weight;
}

// The logarithms of a call: [b0, b1, heads, keys], contiguous. A dim has one entry if all share it.
struct LogPlan {
  const float* weights;
  FlashsciScoreStrides strides;  // of the weights, by key head
  float* logs;
  uint32_t batch1, heads, group, keys;
  int64_t count;
};

template <class Params>
LogPlan plan_logs(const Params& p) {
  const FlashsciScoreStrides& s = p.bias_mask.bias_strides;
  LogPlan plan{static_cast<const float*>(p.bias_mask.bias), s};
  plan.batch1 = s.batch1 != 0 ? static_cast<uint32_t>(p.batch1) : 1;
  plan.heads = s.head != 0 ? p.heads_q : 1;
  plan.group = p.heads_q / p.heads_k;
  plan.keys = p.seq_k;
  plan.count = (s.batch0 != 0 ? p.batch0 : 1) * plan.batch1 * plan.heads * plan.keys;
  return plan;
}

// Bytes of workspace; 0 without weights.
template <class Params>
int64_t bytes_of_logs(const Params& p) {
  return has_weights(p.bias_mask) ? (plan_logs(p).count * 4 + 255) / 256 * 256 : 0;
}

// Of: the unit that has the kernel.
template <class Of>
__global__ void __launch_bounds__(256) log_weights_kernel(const __grid_constant__ LogPlan plan) {
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < plan.count;
       i += int64_t{gridDim.x} * 256) {
    const int64_t row = i / plan.keys, batch = row / plan.heads;
    const int64_t key = i - row * plan.keys, head = (row - batch * plan.heads) / plan.group;
    const int64_t batch0 = batch / plan.batch1, batch1 = batch - batch0 * plan.batch1;
    const FlashsciScoreStrides& s = plan.strides;
    plan.logs[i] = logf(counted(__ldg(plan.weights + batch0 * s.batch0 + batch1 * s.batch1 +
                                      head * s.head + key * s.column)));
  }
}

// The tiles of the gradient, where plan_bias_tiles took weights for a bias of query heads.
inline void own_by_key_heads(BiasPlan& plan, const FlashsciBackwardParams& p) {
  if (p.dbias_strides.head == 0) return;
  const auto group = static_cast<uint32_t>(p.heads_q / p.heads_k);
  plan.own[2] = p.heads_k, plan.members[2] = group;
  plan.elements /= group, plan.member_count *= group;
}

// Writes the logarithms to `memory` and puts them in the place of the weights.
template <class Of, class Params>
cudaError_t take_logs(Params& p, void* memory, cudaStream_t stream) {
  LogPlan plan = plan_logs(p);
  plan.logs = static_cast<float*>(memory);
  p.bias_mask.bias = memory;
  p.bias_mask.bias_is_fp32 = 1;
  FlashsciScoreStrides& s = p.bias_mask.bias_strides;
  const int64_t of_batch1 = int64_t{plan.heads} * plan.keys;
  s = {s.batch0 != 0 ? plan.batch1 * of_batch1 : 0, s.batch1 != 0 ? of_batch1 : 0,
       s.head != 0 ? int64_t{plan.keys} : 0, 0, 1};
  return launch<log_weights_kernel<Of>>(std::min<int64_t>((plan.count + 255) / 256, 4096), 256, 0,
                                        p.device, stream, plan);
}

}  // namespace flashsci::sm80::weights
