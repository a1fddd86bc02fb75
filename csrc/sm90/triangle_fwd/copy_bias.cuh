// A copy for TMA of a bias whose keys are not neighbours (the output of a Linear over pairs, [..,
// Sq, Sk, H]): [.., H, Sq, Sk], rows of whole 16 bytes.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../../include/flashsci.h"
#include "../../ptx/warpgroup.cuh"

namespace flashsci::sm90::triangle_fwd {

// Threads per block. Next to a CTA of the following kernel an SM has 4,096 registers left: enough
// for one of these blocks, so that the copy runs until that CTA needs the bias.
inline constexpr int kCopyThreads = 128;

// The sizes of the bias itself: 1 where it is broadcast.
struct BiasCopy {
  FlashsciScoreStrides from, to;
  uint32_t batch0, batch1, heads, rows, keys;
  uint32_t width;  // bytes that a thread reads at a time: neighbouring heads of a key
  int64_t bytes;
  int64_t items(int size) const {  // blocks of kCopyThreads keys and `width` bytes
    return int64_t{batch0} * batch1 * rows * ((keys + kCopyThreads - 1) / kCopyThreads) *
           (heads * size / width);
  }
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
  const auto fits = [&](int64_t bytes) {
    const auto aligned = [&](int64_t count, int64_t stride) {
      return count <= 1 || stride * size % bytes == 0;
    };
    return copy.from.head == 1 && copy.heads * size % bytes == 0 &&
           reinterpret_cast<uintptr_t>(p.bias_mask.bias) % bytes == 0 &&
           aligned(copy.batch0, copy.from.batch0) && aligned(copy.batch1, copy.from.batch1) &&
           aligned(copy.rows, copy.from.row) && aligned(copy.keys, copy.from.column);
  };
  copy.width = static_cast<uint32_t>(fits(16) ? 16 : fits(8) ? 8 : size);
  return copy;
}

// Neighbouring keys are written by neighbouring threads. The next kernel may start at once, and
// waits before it reads the copy.
template <int kBytes, int kWidth>
__global__ void __launch_bounds__(kCopyThreads, 16)
    triangle_forward_copy_bias_kernel(const void* bias, void* workspace,
                                      const __grid_constant__ BiasCopy copy) {
  using T = std::conditional_t<kBytes == 4, uint32_t, uint16_t>;
  using Words = std::conditional_t<kWidth == 16, uint4, std::conditional_t<kWidth == 8, uint2, T>>;
  constexpr int kHeads = kWidth / kBytes, kAtOnce = kWidth == 16 ? 3 : 6;
  ptx::launch_dependents();
  const uint32_t parts = (copy.keys + kCopyThreads - 1) / kCopyThreads,
                 groups = copy.heads / kHeads;
  const uint32_t items = copy.batch0 * copy.batch1 * copy.rows * groups * parts;
  struct Place {
    int64_t from, to;
    bool valid;
  };
  const auto place_of = [&](uint32_t item) {
    const uint32_t line = item / parts, key = (item - line * parts) * kCopyThreads + threadIdx.x;
    const uint32_t row_of_all = line / groups, head = (line - row_of_all * groups) * kHeads;
    const uint32_t batch = row_of_all / copy.rows, row = row_of_all - batch * copy.rows;
    const uint32_t batch0 = batch / copy.batch1, batch1 = batch - batch0 * copy.batch1;
    const auto at = [&](const FlashsciScoreStrides& s) {
      return batch0 * s.batch0 + batch1 * s.batch1 + head * s.head + row * s.row + key * s.column;
    };
    return Place{at(copy.from), at(copy.to), item < items && key < copy.keys};
  };
#pragma unroll 1
  for (uint32_t first = blockIdx.x; first < items; first += gridDim.x * kAtOnce) {
    Words words[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const Place place = place_of(first + i * gridDim.x);
      if (place.valid)
        words[i] = __ldg(reinterpret_cast<const Words*>(static_cast<const T*>(bias) + place.from));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const Place place = place_of(first + i * gridDim.x);
      T numbers[kHeads];
      memcpy(numbers, &words[i], kWidth);
      if (place.valid)
#pragma unroll
        for (int head = 0; head < kHeads; ++head)
          static_cast<T*>(workspace)[place.to + head * copy.to.head] = numbers[head];
    }
  }
}

}  // namespace flashsci::sm90::triangle_fwd
