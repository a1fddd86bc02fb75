// Attention in fp32 with a bias of its own for every pair and head whose heads lie side by side in
// memory, [.., Sq, Sk, H], as a Linear over pairs leaves it: what its kernels have in common.
//
// Such a bias is as large as all scores. Kernels for which keys are neighbours need a copy first
// and another one of the gradient; they take as long as the attention itself. Here a CTA works on
// eight heads at a time, so that what it reads of a pair is a sector, and a lane has the scores of
// four heads for its pairs. That leaves few rows for a CTA; those of a cluster share the others'
// side among them and add up what they have.
#pragma once
#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "../../include/flashsci.h"

namespace flashsci::sm90::pair {

inline constexpr int kHeads = 8, kQuad = 4;  // heads of a CTA, and of a warp
inline constexpr int kRows = 32;             // rows of a CTA, queries or keys, and of a stage
inline constexpr int kWarpRows = 16;         // rows of a warp on either side
// A warp has one half of the CTA's rows, of its heads, and of the rows of a stage.
inline constexpr int kWarps = 8, kThreads = kWarps * 32;
inline constexpr int kMostCtas = 4;  // of a cluster
// What is copied of a pair. (Of boxes whose inner dimension has 16 bytes TMA reports the end too
// early.)
inline constexpr int kCellBytes = kHeads * 4;
inline constexpr int kSharedBytes = 227 * 1024;  // what Hopper has for a CTA

// A block of what a CTA goes through: of the pairs, all others of one of its rows side by side.
template <int kDim>
struct alignas(1024) Stage {
  float first[kHeads][kRows][kDim];   // K, or Q
  float second[kHeads][kRows][kDim];  // V, or dO
  unsigned char cells[kRows][kRows * kCellBytes];
  float2 statistics[kHeads][kRows];  // of queries
};

// What there is of the rows of a CTA, to be added up; and of the forward the largest score of a row
// and the sum of its exponentials.
template <int kDim>
struct Partial {
  float x[kHeads][kRows][kDim + 4];
  float2 maximum_sum[kHeads][kRows];
};

// kOwn: tensors of which a CTA keeps its rows: Q (and dO), or K and V.
template <int kDim_, int kOwn_>
struct Tiling {
  static constexpr int kDim = kDim_, kOwn = kOwn_;
  static constexpr int kBoxBytes = kHeads * kRows * kDim * 4;
  static constexpr int kRoom = kSharedBytes - 2 * 1024 - kOwn * kBoxBytes;
  static constexpr int kStages = std::min<int>(3, kRoom / sizeof(Stage<kDim>));
  static_assert(kStages >= 1 && kRoom >= 2 * int{sizeof(Partial<kDim>)}, "no room");
};

template <class C>
struct alignas(1024) Storage {
  unsigned char own[C::kOwn][C::kBoxBytes];
  union {
    Stage<C::kDim> stage[C::kStages];
    Partial<C::kDim> partial[2];  // of each half of the rows of stages
  };
  uint64_t copied[C::kStages], own_copied;  // mbarriers
};

struct Maps {
  CUtensorMap q, k, v, dout;
  // All keys of a query side by side, or all queries of a key.
  CUtensorMap bias, dbias, bias_of_keys;
};

struct Plan {
  uint32_t query_tiles, key_tiles;  // of a head
  uint32_t query_clusters;          // of the backward, that go through keys; the others follow
  const float2* statistics;         // [B0, B1, H, statistics_rows]
  int64_t statistics_rows;
};

}  // namespace flashsci::sm90::pair
