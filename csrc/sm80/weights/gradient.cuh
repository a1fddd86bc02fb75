// The gradient of key weights, from that of their logarithms.
//
// Maths     dw_j = sum_i e^(s_ij - lse_i) (dP_ij - delta_i). The kernels of a bias compute the sum of
//           e^(s_ij + b_j - lse_i) (dP_ij - delta_i), which is dw_j e^(b_j) for any b_j. This one is
//           the logarithm of max(w_j, kLeast): exponentials stay in range, and a weight of zero is no
//           special case. Terms below 2^-66 are lost.
// Roles     A thread for each weight: it adds up the query heads of its key head.
// Shared    None.
// Pipeline  None: enough CTAs.
// Limits    Memory.
#pragma once
#include "logs.cuh"

namespace flashsci::sm80::weights {

inline constexpr float kLeast = 0x1p-60f;

struct GradientPlan {
  const float* sums;  // [b0, b1, query heads, keys], with one entry where the weights have one
  const float* weights;
  float* gradient;
  FlashsciScoreStrides strides, gradient_strides;  // by key head
  uint32_t batch1, heads, group, keys;
  int64_t count;

  explicit GradientPlan(const FlashsciBackwardParams& p)
      : weights(static_cast<const float*>(p.bias_mask.bias)),
        gradient(static_cast<float*>(p.dbias)),
        strides(p.bias_mask.bias_strides),
        gradient_strides(p.dbias_strides) {
    const FlashsciScoreStrides& s = p.dbias_strides;
    batch1 = s.batch1 != 0 ? static_cast<uint32_t>(p.batch1) : 1;
    heads = s.head != 0 ? p.heads_k : 1;
    group = s.head != 0 ? p.heads_q / p.heads_k : 1;
    keys = s.column != 0 ? p.seq_k : 1;
    count = (s.batch0 != 0 ? p.batch0 : 1) * batch1 * heads * keys;
  }
  FlashsciScoreStrides sum_strides() const {
    return contiguous(gradient_strides, batch1, heads * group, keys);
  }
};

__global__ void __launch_bounds__(256)
    weight_gradient_kernel(const __grid_constant__ GradientPlan plan) {
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < plan.count;
       i += int64_t{gridDim.x} * 256) {
    const int64_t row = i / plan.keys, batch = row / plan.heads;
    const int64_t key = i - row * plan.keys, head = row - batch * plan.heads;
    const int64_t batch0 = batch / plan.batch1, batch1 = batch - batch0 * plan.batch1;
    const auto at = [&](const FlashsciScoreStrides& s) {
      return batch0 * s.batch0 + batch1 * s.batch1 + head * s.head + key * s.column;
    };
    const float* sums = plan.sums + row * plan.group * plan.keys + key;
    float sum = 0.f;
    for (uint32_t member = 0; member < plan.group; ++member) sum += sums[member * plan.keys];
    plan.gradient[at(plan.gradient_strides)] =
        sum / counted(__ldg(plan.weights + at(plan.strides)), kLeast);
  }
}

}  // namespace flashsci::sm80::weights
