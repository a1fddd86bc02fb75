// Tiles and shared memory of the fp32 backward, and the values that the host derives once.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../include/flashsci.h"
#include "../fp32_common/bias_mask.cuh"
#include "../fp32_common/stream.cuh"

namespace flashsci::sm80::bwd_fp32 {

static_assert(std::is_trivially_copyable_v<FlashsciBackwardParams>, "passed to kernels by value");

template <int kDim_, int kWarps_, int kM_, int kN_, int kMinBlocks_>
struct BackwardTile {
  static constexpr int kDim = kDim_, kWarps = kWarps_, kM = kM_, kN = kN_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kM * 16;  // per warp
  static constexpr int kBlockRows = kRows * kWarps, kBlockColumns = kN * 8;
  static constexpr int kDimBlocks = kDim / 8;
};

template <class C>
struct alignas(128) BackwardStorage {
  SplitFp16Tile<C::kBlockRows, C::kDim> x, y;                    // Q and dO, or K and V
  StreamStorage<C::kBlockColumns, C::kDim, C::kThreads> stream;  // K and V, or Q and dO
  float x_factor[C::kBlockRows], y_factor[C::kBlockRows];
  float2 statistics[2][C::kBlockColumns];  // [raw tile, halves]: lse in log2 units, delta
};

// The values that the host derives once from the parameters.
struct BackwardFp32Plan {
  float2* statistics;  // [B0, B1, Hq, Sq]: lse in log2 units (+inf for a row without keys), delta
  uint32_t tiles;      // grid slots per head
  int vector;          // rows of q, k, v, dout take 16-byte copies
  int vector_dq, vector_dk, vector_dv;
  int plain;       // scores are the exponents, up to a positive factor
  float inner;     // factor of the scores: to log2 units if plain, else to natural units or those
                   // of the cap
  float cap;       // softcap or 0
  int write_bias;  // the kernel of the queries writes dbias
  int vector_dbias;
  BiasMaskAccess bias_mask;
  float inverse_cap;  // 1 / softcap; `capped` only, where `inner` is that of natural units
};

}  // namespace flashsci::sm80::bwd_fp32
