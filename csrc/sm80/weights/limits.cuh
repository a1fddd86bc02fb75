// The gradient of key weights, dw_j = sum_i e^(s_ij - lse_i) (dP_ij - delta_i), in the kernels that
// reduce the gradient of a bias: their scores have no bias then, and nothing divides by w.
//
// P = w e^(s - lse) is at most 1, so e^(s - lse) is at most 1 / w. A weight of zero bounds nothing:
// its limit is kLargest, and 1 in a row whose lse is too large to bound it.
#pragma once
#include "../../core/dropout.cuh"
#include "../../core/softmax.cuh"
#include "logs.cuh"

namespace flashsci {

namespace sm80::weights {

inline constexpr float kLargest = 1e38f;

__device__ __forceinline__ float limit_of(float weight) {
  return fminf(1.f / counted(weight), kLargest);
}
__device__ __forceinline__ float limited(float x, float limit, float lse) {
  return fminf(x, limit == kLargest && is_large(lse) ? 1.f : limit);
}

// The last argument of a kernel: the weights, by key head.
struct KeyWeights {
  const float* data;
  FlashsciScoreStrides strides;
};

}  // namespace sm80::weights

template <>
struct Dropping<sm80::weights::KeyWeights> {
  static constexpr bool kDrops = false, kWeighted = true;
  const sm80::weights::KeyWeights& of;
  __device__ __forceinline__ explicit Dropping(const sm80::weights::KeyWeights& given)
      : of(given) {}
};

}  // namespace flashsci
