// Key weights as a bias: the logarithm of each weight.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../../core/launch.cuh"
#include "../../include/flashsci.h"

namespace flashsci::sm80::weights {

// A weight as it counts: `least`, if it is smaller or subnormal.
__device__ __forceinline__ float counted(float weight, float least) {
  return fabsf(weight) < fmaxf(least, 0x1p-126f) ? least : weight;
}

// The logarithms of a call: [b0, b1, query heads, keys], contiguous. A dim has one entry if all
// share it.
struct LogPlan {
  const float* weights;
  FlashsciScoreStrides strides;  // of the weights, by key head
  float least;
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
  plan.keys = s.column != 0 ? p.seq_k : 1;
  plan.count = (s.batch0 != 0 ? p.batch0 : 1) * plan.batch1 * plan.heads * plan.keys;
  return plan;
}

__global__ void __launch_bounds__(256) log_weights_kernel(const __grid_constant__ LogPlan plan) {
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < plan.count;
       i += int64_t{gridDim.x} * 256) {
    const int64_t row = i / plan.keys, batch = row / plan.heads;
    const int64_t key = i - row * plan.keys, head = (row - batch * plan.heads) / plan.group;
    const int64_t batch0 = batch / plan.batch1, batch1 = batch - batch0 * plan.batch1;
    const FlashsciScoreStrides& s = plan.strides;
    const float weight = __ldg(plan.weights + batch0 * s.batch0 + batch1 * s.batch1 +
                               head * s.head + key * s.column);
    plan.logs[i] = logf(counted(weight, plan.least));
  }
}

inline int blocks_of(int64_t count) {
  return static_cast<int>(std::min<int64_t>((count + 255) / 256, 4096));
}

// Strides of [b0, b1, heads, keys], contiguous, where a dim that `like` shares has one entry.
inline FlashsciScoreStrides contiguous(const FlashsciScoreStrides& like, int64_t batch1,
                                       int64_t heads, int64_t keys) {
  return {like.batch0 != 0 ? batch1 * heads * keys : 0, like.batch1 != 0 ? heads * keys : 0,
          like.head != 0 ? keys : 0, 0, like.column != 0 ? 1 : 0};
}

// Writes the logarithms to `memory`. The result is the call that has them as its bias.
template <class Params>
cudaError_t take_logs(Params& biased, const Params& p, float least, void* memory,
                      cudaStream_t stream) {
  LogPlan plan = plan_logs(p);
  plan.least = least;
  plan.logs = static_cast<float*>(memory);
  biased.bias_mask.bias = memory;
  biased.bias_mask.bias_is_fp32 = 1;
  biased.bias_mask.bias_strides = contiguous(plan.strides, plan.batch1, plan.heads, plan.keys);
  return launch<log_weights_kernel>(blocks_of(plan.count), 256, 0, p.device, stream, plan);
}

}  // namespace flashsci::sm80::weights
