// What the backward kernels share: what the host derives from the parameters, places, and the
// workspace.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "../common/sequence.cuh"
#include "../common/softmax.cuh"
#include "../common/tile.cuh"
#include "../common/window.cuh"
#include "../include/flashsci.h"

namespace flashsci::sm80 {

static_assert(std::is_trivially_copyable_v<FlashsciBackwardParams>, "passed to kernels by value");

enum BackwardScoreMode { kScaled = 0, kLinear = 1, kSoftcap = 2 };

struct BackwardPlan {
  // Workspace. statistics: [B0, B1, Hq, Sq] of (-lse in log2 units, -delta); (-inf, 0) where a row
  // sees no key. dq_sums: a tile of fp32 sums in fragment order for each slot of each query head.
  float2* statistics;
  float* dq_sums;
  float* bias_sums;      // [splits, elements of dbias], when the members are split
  int group;             // query heads of a key head
  uint32_t query_slots;  // query tiles of one query head in dq_sums
  int score_mode;        // how raw q.k becomes what is exponentiated
  float score_inner;     // kLinear: s *= inner; kSoftcap: s = outer * tanh(inner * s)
  float score_outer;
  float exp_scale;    // log2(e) times what is left to multiply by
  float bias_factor;  // from natural units to those of s; kScaled only
  int bias_first;     // there is a bias, and scores can start from it
  int vector;         // q, k, v, dout rows take 16-byte copies
  int vector_dq, vector_dk, vector_dv;
  int bias_vector, mask_vector, dbias_vector;  // rows of four keys are aligned and whole
  int adds_dq;                                 // backward_kernel adds dq to dq_sums
  int writes_dq;    // backward_kernel writes dq: all keys are in its tile
  int writes_bias;  // backward_kernel writes dbias: it has a place for every pair
};

// Which head of which batch a block works on: `heads` heads of `tiles` blocks each.
struct BackwardPlace {
  uint32_t tile, batch, batch0, batch1, head;

  __device__ __forceinline__ BackwardPlace(uint32_t block, uint32_t tiles, int heads,
                                           const FlashsciBackwardParams& p) {
    const uint32_t batch_head = block / tiles;
    tile = block - batch_head * tiles;
    batch = batch_head / static_cast<uint32_t>(heads);
    head = batch_head - batch * static_cast<uint32_t>(heads);
    batch0 = batch / static_cast<uint32_t>(p.batch1);
    batch1 = batch - batch0 * static_cast<uint32_t>(p.batch1);
  }
  // Elements from the start of a tensor, in 64 bits.
  __device__ __forceinline__ int64_t offset(const FlashsciStrides& strides,
                                            uint32_t of_head) const {
    return batch0 * strides.batch0 + batch1 * strides.batch1 + of_head * strides.head;
  }
  __device__ __forceinline__ int64_t offset(const FlashsciPairStrides& strides,
                                            uint32_t of_head) const {
    return batch0 * strides.batch0 + batch1 * strides.batch1 + of_head * strides.head;
  }
};

// S becomes softcap tanh(S / softcap); dP - delta takes the slope.
template <int kM, int kN>
__device__ __forceinline__ void apply_softcap(float (&s)[kM][kN][4], float (&dp)[kM][kN][4],
                                              const BackwardPlan& plan, bool slopes = true) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) {
    float& x = s[i / (4 * kN)][i / 4 % kN][i % 4];
    const float t = tanh_accurate(plan.score_inner * x);
    x = plan.score_outer * t;
    if (slopes) dp[i / (4 * kN)][i / 4 % kN][i % 4] *= fmaf(-t, t, 1.f);
  }
}

template <int kM, int kN>
__device__ __forceinline__ void scale_linear(float (&s)[kM][kN][4], float factor) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) s[i / (4 * kN)][i / 4 % kN][i % 4] *= factor;
}

// 16-byte loads or stores of all rows.
inline bool takes_vectors(const void* data, const FlashsciStrides& s, int head_dim) {
  const uint64_t bits = static_cast<uint64_t>(s.batch0 | s.batch1 | s.head | s.row | head_dim);
  return bits % kChunkElements == 0 && reinterpret_cast<uintptr_t>(data) % kChunkBytes == 0;
}

// Allows a kernel more than 48 KiB of shared memory, once per device; a lost race only repeats it.
template <auto kKernel>
cudaError_t allow_shared(int bytes, int device) {
  static std::atomic<uint64_t> configured{0};
  if (bytes <= 48 * 1024) return cudaSuccess;
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (device < 64 && (configured.load(std::memory_order_relaxed) & bit)) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) configured.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

}  // namespace flashsci::sm80
