// The sm80 forward: tile shapes, shared memory, and the values that the host derives from the
// parameters.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../../core/score_mod.cuh"
#include "../../include/flashsci.h"

namespace flashsci::sm80::fwd {

static_assert(std::is_trivially_copyable_v<FlashsciForwardParams>, "passed to the kernel by value");

#ifndef FLASHSCI_TILE_PRESET
#define FLASHSCI_TILE_PRESET 1
#endif
// Limits of one block: t4_safe fits Turing's 64 KiB, ampere_balanced the 99 KiB of sm_86 and sm_89.
#if FLASHSCI_TILE_PRESET == 0
inline constexpr int kSharedBudget = 64 * 1024;
#else
inline constexpr int kSharedBudget = 99 * 1024;
#endif

template <int kHeadDim_, int kBlockQ_, int kBlockK_, int kWarps_, int kStages_, int kMinBlocks_>
struct Tiling {
  static constexpr int kHeadDim = kHeadDim_, kBlockQ = kBlockQ_, kBlockK = kBlockK_;
  static constexpr int kWarps = kWarps_, kStages = kStages_, kMinBlocks = kMinBlocks_;
  using TwoStages = Tiling<kHeadDim_, kBlockQ_, kBlockK_, kWarps_, 2, kMinBlocks_>;
  // The same for rows that take no 16-byte copies: the copies need registers.
  using Unaligned =
      Tiling<kHeadDim_, kBlockQ_, kHeadDim_ == 128 ? 32 : kBlockK_, kWarps_, 1, kMinBlocks_>;
  static constexpr bool kFewRegisters =
      kStages == 2 || kBlockK > 64 || (kHeadDim == 128 && kBlockQ == 128);
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kBlockQ / kWarps;   // query rows per warp
  static constexpr int kM = kRows / 16;            // m16 blocks of a warp
  static constexpr int kN = kBlockK / 8;           // n8 blocks of S
  static constexpr int kDimBlocks = kHeadDim / 8;  // n8 blocks of O
  static_assert(kRows % 16 == 0 && kBlockK % 16 == 0 && kHeadDim % 32 == 0, "whole mma tiles");
};

struct Shape {
  int block_q, block_k, warps, min_blocks;
};

// Tile shape of a padded head dimension; measured in docs/develop/kernels/sm80_forward.md. 32 rows
// a warp if the accumulators (rows x (keys + dims) / 32 registers) leave room, two CTAs an SM to
// fill each other's gaps.
constexpr Shape shape_of(int head_dim) {
  if (FLASHSCI_TILE_PRESET == 0)
    return head_dim <= 128 ? Shape{128, 64, 4, 2} : Shape{64, 32, 4, 2};
  if (head_dim <= 64) return {128, 128, 4, 2};
  if (head_dim <= 128) return {128, 64, 4, 2};
  return {64, 64, 4, 2};
}

template <int kHeadDim>
using Tiles = Tiling<kHeadDim, shape_of(kHeadDim).block_q, shape_of(kHeadDim).block_k,
                     shape_of(kHeadDim).warps, 1, shape_of(kHeadDim).min_blocks>;

// When no sequence has more than 64 queries: half the rows, and more CTAs an SM to hide latencies.
template <int kHeadDim>
using SmallTiles = Tiling<kHeadDim, 64, 64, 4, 1, kHeadDim <= 64 ? 4 : 3>;

template <class C>
struct alignas(128) SharedStorage {
  uint16_t q[C::kBlockQ * C::kHeadDim];              // [kBlockQ, kHeadDim], then the output tile
  uint16_t k[C::kStages][C::kBlockK * C::kHeadDim];  // [stage, kBlockK, kHeadDim]
  uint16_t v[C::kStages][C::kBlockK * C::kHeadDim];  // [stage, kBlockK, kHeadDim]
};

// The values that the host derives once from the parameters.
struct ForwardPlan {
  uint32_t tiles;  // grid slots of one head
  ScorePlan scores;
  float lse_scale;  // from the units of the running maximum to natural log
  int vector_out;   // output rows take 16-byte stores
};

}  // namespace flashsci::sm80::fwd
