// The bias of packed calls: the place of a sequence in it.
#pragma once
#include <cstdint>

#include "../include/flashsci.h"
#include "../include/flashsci_ragged.h"
#include "alibi.cuh"

namespace flashsci {

// Whether the bias of a call is one of packed sequences.
template <class Params>
__host__ __device__ __forceinline__ bool has_ragged_bias(const Params& p) {
  return p.cu_seqlens_q != nullptr && p.bias_mask.bias != nullptr && !has_slopes(p.bias_mask);
}

// Whether it has blocks of pairs.
template <class Params>
__host__ __device__ __forceinline__ bool has_ragged_pairs(const Params& p) {
  return has_ragged_bias(p) && p.bias_mask.mask_strides.batch0 != 0;
}

// Whether kernels write the gradient of such a bias.
inline bool has_ragged_gradient(const FlashsciBackwardParams& p) {
  return has_ragged_pairs(p) && (p.dbias_strides.head != 0 || p.heads_q == 1) &&
         (p.softcap == 0.f || p.bias_mask.capped != 0);
}

// Elements from row to row of a bias or its gradient. pairs: whether it has blocks of pairs, 1 or 0;
// keys: those of the sequence.
__device__ __forceinline__ int64_t row_of_pairs(const FlashsciScoreStrides& strides, int pairs,
                                                int keys) {
  return strides.row + static_cast<int64_t>(keys) * pairs;
}

// The index of the first number of a sequence, or -1 if its block would leave the bias.
__device__ __forceinline__ int64_t ragged_start(const FlashsciBiasMask& p, int sequence,
                                                int first_k, int seq_q, int seq_k) {
  if (p.mask_strides.batch0 == 0) return first_k;
  if (seq_q <= 0 || seq_k <= 0) return 0;  // perhaps rows of no sequence
  const auto* starts = reinterpret_cast<const int64_t*>(p.mask_strides.batch0);
  const int64_t start = __ldg(reinterpret_cast<const long long*>(starts + sequence));
  return start < 0 || int64_t{seq_q} * seq_k > p.mask_strides.batch1 - start ? -1 : start;
}

}  // namespace flashsci
