// Attention with a bias of its own for every pair and head whose heads lie side by side in memory,
// [.., Sq, Sk, H], as a Linear over pairs leaves it: what its kernels have in common.
//
// Such a bias is as large as all scores. Kernels for which keys are neighbours need a copy first
// and another one of the gradient; they take as long as the attention itself. Here a CTA works on
// four or eight heads at a time, so that what it reads of a pair are neighbours, and a lane has the
// scores of four heads for its pairs. That leaves few rows for a CTA; those of a cluster share the
// others' side among them and add up what they have.
#pragma once
#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "../../include/flashsci.h"

namespace flashsci::sm90::pair {

inline constexpr int kQuad = 4;       // heads of a warp
inline constexpr int kWarpRows = 16;  // rows of a warp, and of a block that it goes through
inline constexpr int kRows = 32;      // rows of a CTA, queries or keys, and of what a copy moves
// What is copied of a pair: a sector, with other heads in it than the CTA's where it has fewer. (Of
// boxes whose inner dimension has 16 bytes TMA reports the end too early.)
inline constexpr int kCellBytes = 32;
inline constexpr int kWarps = 8, kThreads = kWarps * 32;
inline constexpr int kMostCtas = 4;              // of a cluster
inline constexpr int kSharedBytes = 227 * 1024;  // what Hopper has for a CTA

// Format: half.cuh or single.cuh. kQuads: of heads of a CTA. kBiasBytes: of an element of the bias.
// A warp has the first or the second half of the CTA's rows, a quad of its heads, and of a stage
// every kSplits-th kWarpRows rows.
template <class Format_, int kQuads_, int kBiasBytes_>
struct Shape {
  using Format = Format_;
  static constexpr int kDim = Format::kDim, kQuads = kQuads_, kHeads = kQuads * kQuad;
  static constexpr int kBiasBytes = kBiasBytes_;
  static constexpr int kSplits = kWarps / (2 * kQuads);
  static constexpr int kBoxes = kSplits * kWarpRows / kRows;  // of kRows rows in a stage
  static constexpr int kBlock = kBoxes * kRows;               // rows of a stage: keys, or queries
  static constexpr int kCellHeads = kCellBytes / kBiasBytes;
  static constexpr int kBoxBytes = kHeads * kRows * Format::kRowBytes;
};

// What a copy brings, a box of kRows rows of all heads after the other: of the pairs, all others of
// one of the CTA's rows side by side.
template <class C>
struct alignas(1024) Stage {
  unsigned char first[C::kBoxes][C::kBoxBytes];   // K, or Q
  unsigned char second[C::kBoxes][C::kBoxBytes];  // V, or dO
  unsigned char cells[C::kBoxes][kRows][kRows * kCellBytes];
  float2 statistics[C::kBoxes][C::kHeads][kRows];  // of queries
};

// What there is of the rows of a CTA, to be added up; and of the forward the largest score of a row
// and the sum of its exponentials.
template <class C>
struct Partial {
  float x[C::kHeads][kRows][C::kDim + 4];
  float2 maximum_sum[C::kHeads][kRows];
};

// kOwn: tensors of which a CTA keeps its rows: Q (and dO), or K and V.
template <class C, int kOwn_>
struct Tiling : C {
  static constexpr int kOwn = kOwn_;
  static constexpr int kRoom = kSharedBytes - 2 * 1024 - kOwn * C::kBoxBytes;
  static constexpr int kStages = std::min<int>(3, kRoom / sizeof(Stage<C>));
  static_assert(kStages >= 1 && kRoom >= C::kSplits * int{sizeof(Partial<C>)}, "no room");
};

template <class C>
struct alignas(1024) Storage {
  unsigned char own[C::kOwn][C::kBoxBytes];
  union {
    Stage<C> stage[C::kStages];
    Partial<C> partial[C::kSplits];
  };
  uint64_t copied[C::kStages], own_copied;  // mbarriers
};

struct Maps {
  CUtensorMap q, k, v, dout;
  CUtensorMap bias, bias_of_keys;  // all keys of a query side by side, or all queries of a key
};

struct Plan {
  uint32_t query_tiles, key_tiles;  // of a head
  uint32_t query_clusters;          // of the backward, that go through keys; the others follow
  const float2* statistics;         // [B0, B1, H, statistics_rows]
  int64_t statistics_rows;
};

}  // namespace flashsci::sm90::pair
