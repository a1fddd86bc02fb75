// The common part of the kernels of attention in fp32 with a separate bias for every pair and head,
// whose heads are neighbours in memory, [.., Sq, Sk, H], the output layout of a Linear over pairs.
//
// Such a bias is as large as all scores. Kernels that need keys to be neighbours need a copy first
// and another one of the gradient, each as long as the attention itself. Here a CTA works on eight
// heads at a time, so that its read of a pair is a whole sector, and a lane has the scores of four
// heads for its pairs. That leaves few rows for a CTA; the CTAs of a cluster share the other side
// among them and add up their results.
#pragma once
#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "../../include/flashsci.h"

namespace flashsci::sm90::pair {

inline constexpr int kHeads = 8, kQuad = 4;  // heads per CTA, and per warp
inline constexpr int kRows = 32;             // rows per CTA, queries or keys, and per stage
inline constexpr int kWarpRows = 16;         // rows per warp on either side
// A warp has one half of the CTA's rows, of its heads, and of the rows of a stage.
inline constexpr int kWarps = 8, kThreads = kWarps * 32;
inline constexpr int kMostCtas = 4;  // per cluster
// The heads of a pair that are copied. (For boxes whose inner dimension has 16 bytes TMA reports
// completion too early.)
inline constexpr int kCellBytes = kHeads * 4;
inline constexpr int kSharedBytes = 227 * 1024;  // Hopper's limit for a CTA

// A block of the other side: the pairs of one of the CTA's rows with all rows of the block are
// neighbours.
template <int kDim>
struct alignas(1024) Stage {
  float first[kHeads][kRows][kDim];   // K, or Q
  float second[kHeads][kRows][kDim];  // V, or dO
  unsigned char cells[kRows][kRows * kCellBytes];
  float2 statistics[kHeads][kRows];  // of queries
};

// Partial results of the CTA's rows, to be added up; the forward also has the largest score of a
// row and the sum of its exponentials.
template <int kDim>
struct Partial {
  float x[kHeads][kRows][kDim + 4];
  float2 maximum_sum[kHeads][kRows];
};

// kOwn: tensors whose rows the CTA keeps: Q (and dO), or K and V.
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
    Partial<C::kDim> partial[2];  // one for each half of the stages' rows
  };
  uint64_t copied[C::kStages], own_copied;  // mbarriers
};

struct Maps {
  CUtensorMap q, k, v, dout;
  // All keys of a query are neighbours, or all queries of a key.
  CUtensorMap bias, dbias, bias_of_keys;
};

struct Plan {
  uint32_t query_tiles, key_tiles;  // of a head
  uint32_t query_clusters;          // of the backward, that go through keys; the others follow
  const float2* statistics;         // [B0, B1, H, statistics_rows]
  int64_t statistics_rows;
};

}  // namespace flashsci::sm90::pair
