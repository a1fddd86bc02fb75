// The common part of the kernels of attention in 16 bits with an fp32 bias whose heads are
// neighbours in memory (../config.cuh).
//
// A CTA has 32 rows of eight heads and the CTAs of a cluster share the other side, as in fp32. But
// products take almost no time here; copies, shared memory, and the sums of a cluster remain. So a
// separate thread copies, rows of eight heads at a time, accesses have no bank conflicts, and
// partial sums are pushed to the CTA that adds them up.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../config.cuh"

namespace flashsci::sm90::pair::half {

// Includes a warpgroup of which one thread copies: registers move by warpgroups.
inline constexpr int kLaunched = kThreads + 128, kCopyRegisters = 24, kRegisters = 240;

// Rows of eight neighbouring heads, as in global memory, cut into 128 bytes each, in which TMA
// exchanges pieces of 16. (If it copied by heads, TMA would take three cycles for each 48 bytes, as
// long as all other work.)
inline constexpr int kPanelBytes = 128;
template <int kDim>
struct alignas(1024) Rows {
  static constexpr int kPanels = kHeads * kDim * 2 / kPanelBytes;
  unsigned char panel[kPanels][kRows][kPanelBytes];
};

inline constexpr int kBoxPairs = 4;  // per row: 128 bytes of a box of pairs

// A block of the other side.
template <int kDim>
struct alignas(1024) Stage {
  unsigned char cells[kRows / kBoxPairs][kRows][kBoxPairs * kCellBytes];
  Rows<kDim> first, second;          // K and V, or Q and dO
  float2 statistics[kHeads][kRows];  // of queries
};

// kOwn: tensors whose rows the CTA keeps. kPieces: a lane's results of a head, in pieces of 16
// bytes.
template <class Op_, int kDim_, int kOwn_, int kPieces_>
struct Tiling {
  using Op = Op_;
  static constexpr int kDim = kDim_, kOwn = kOwn_, kPieces = kPieces_;
  static constexpr int kPartBytes = kHeads * (kRows / kWarpRows) * kPieces * 32 * 16;
  static constexpr int kRoom = kSharedBytes - 2 * 1024 - kOwn * sizeof(Rows<kDim>) - kPartBytes;
  static constexpr int kStages = std::min<int>(3, kRoom / sizeof(Stage<kDim>));
  static_assert(kStages >= 1, "no room");
};

template <class C>
struct alignas(1024) Storage {
  Stage<C::kDim> stage[C::kStages];
  unsigned char parts[C::kPartBytes];  // this CTA's heads from all CTAs of the cluster
  Rows<C::kDim> own[C::kOwn];
  uint64_t copied[C::kStages], read[C::kStages], own_copied, summed;  // mbarriers
};

struct Maps {
  CUtensorMap q, k, v, dout;
  // All keys of a query are neighbours, or all queries of a key.
  CUtensorMap bias, dbias, bias_of_keys;
};

}  // namespace flashsci::sm90::pair::half
