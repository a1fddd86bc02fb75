// A bias whose keys are not neighbours, as a Linear over pairs leaves it ([.., Sq, Sk, H]), copied so
// that TMA takes it: [.., H, Sq, Sk], rows of whole 16 bytes.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../include/flashsci.h"
#include "../../ptx/warpgroup.cuh"

namespace flashsci::sm90::triangle_fwd {

// What the bias has of its own: sizes, 1 where it is broadcast.
struct BiasCopy {
  FlashsciScoreStrides from, to;
  uint32_t batch0, batch1, heads, rows, keys;
  int64_t bytes;
};

inline BiasCopy plan_bias_copy(const FlashsciForwardParams& p) {
  BiasCopy copy{};
  copy.from = p.bias_mask.bias_strides;
  const auto owned = [](int64_t size, int64_t stride) { return stride == 0 ? int64_t{1} : size; };
  const int64_t size = p.bias_mask.bias_is_fp32 ? 4 : 2, whole = 16 / size;
  const int64_t width = (p.seq_k + whole - 1) / whole * whole;
  copy.batch0 = static_cast<uint32_t>(owned(p.batch0, copy.from.batch0));
  copy.batch1 = static_cast<uint32_t>(owned(p.batch1, copy.from.batch1));
  copy.heads = static_cast<uint32_t>(owned(p.heads_q, copy.from.head));
  copy.rows = static_cast<uint32_t>(owned(p.seq_q, copy.from.row));
  copy.keys = static_cast<uint32_t>(p.seq_k);
  const int64_t head = copy.rows * width, batch = copy.heads * head;
  copy.to = {copy.batch0 == 1 ? 0 : copy.batch1 * batch, copy.batch1 == 1 ? 0 : batch,
             copy.heads == 1 ? 0 : head, copy.rows == 1 ? 0 : width, 1};
  copy.bytes = copy.batch0 * (copy.batch1 * batch) * size;
  return copy;
}

// A block copies a row of all heads: they are neighbours in memory most often, so that its threads
// read what is side by side. What follows may start at once, and waits where it reads the copy.
template <int kBytes>
__global__ void __launch_bounds__(256)
    triangle_forward_copy_bias_kernel(const void* bias, void* workspace,
                                      const __grid_constant__ BiasCopy copy) {
  using T = std::conditional_t<kBytes == 4, uint32_t, uint16_t>;
  ptx::launch_dependents();
  const uint32_t batch = blockIdx.x / copy.rows, batch0 = batch / copy.batch1;
  const int64_t batch1 = batch - batch0 * copy.batch1, row = blockIdx.x - batch * copy.rows;
  const T* from = static_cast<const T*>(bias) + batch0 * copy.from.batch0 +
                  batch1 * copy.from.batch1 + row * copy.from.row;
  T* to = static_cast<T*>(workspace) + batch0 * copy.to.batch0 + batch1 * copy.to.batch1 +
          row * copy.to.row;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < copy.heads * copy.keys; i += blockDim.x) {
    const uint32_t key = i / copy.heads, head = i - key * copy.heads;
    to[head * copy.to.head + key] = from[head * copy.from.head + key * copy.from.column];
  }
}

}  // namespace flashsci::sm90::triangle_fwd
