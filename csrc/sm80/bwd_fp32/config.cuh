// Tiles and shared memory of the fp32 backward, and what the host finds out once.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../include/flashsci.h"
#include "../fp32/bias_mask.cuh"
#include "../fp32/stream.cuh"

namespace flashsci::sm80::bwd_fp32 {

static_assert(std::is_trivially_copyable_v<FlashsciBackwardParams>, "passed to kernels by value");

template <int kDim_, int kWarps_, int kM_, int kN_, int kMinBlocks_>
struct BackwardTile {
  static constexpr int kDim = kDim_, kWarps = kWarps_, kM = kM_, kN = kN_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kM * 16;  // of a warp
  static constexpr int kBlockRows = kRows * kWarps, kBlockColumns = kN * 8;
  static constexpr int kDimBlocks = kDim / 8;
};

template <class C>
struct alignas(128) BackwardStorage {
  SplitFp16Tile<C::kBlockRows, C::kDim> x, y;                    // Q and dO, or K and V
  StreamStorage<C::kBlockColumns, C::kDim, C::kThreads> stream;  // K and V, or Q and dO
  float x_factor[C::kBlockRows], y_factor[C::kBlockRows];
  float2 statistics[2]
                   [C::kBlockColumns];  // of the raw tile, of the halves: lse in log2 units, delta
};

// What the host derives from the parameters, once.
struct BackwardFp32Plan {
  float2* statistics;  // [B0, B1, Hq, Sq]: lse in log2 units (+inf for a row without keys), delta
  uint32_t tiles;      // grid slots of one head
  int vector;          // rows of q, k, v, dout take 16-byte copies
  int vector_dq, vector_dk, vector_dv;
  int plain;    // scores are what is exponentiated, up to a positive factor
  float inner;  // factor of the scores: to units of log2 if plain, to natural ones or those of the
                // cap if not
  float cap;    // softcap or 0
  int write_bias;  // the kernel of the queries writes dbias
  int vector_dbias;
  BiasMaskAccess bias_mask;
};

}  // namespace flashsci::sm80::bwd_fp32
