// Attention in 16 bits with an fp32 bias whose heads lie side by side in memory
// (../config.cuh): what its kernels have in common.
//
// A CTA has 32 rows of eight heads and the CTAs of a cluster share the others' side, as in fp32.
// But products take next to no time here: what is left is copies, shared memory, and the sums of a
// cluster. So a thread of its own copies, rows of eight heads at a time, nothing meets in a bank,
// and parts of sums are pushed to the CTA that adds them up.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../config.cuh"

namespace flashsci::sm90::pair::half {

// With a warpgroup of which one thread copies: registers move by warpgroups.
inline constexpr int kLaunched = kThreads + 128, kCopyRegisters = 24, kRegisters = 240;

// Rows of eight heads side by side, as they lie in memory, cut into 128 bytes each, in which TMA
// exchanges pieces of 16. (By heads TMA takes three cycles for each 48 bytes, as long as for all
// else.)
inline constexpr int kPanelBytes = 128;
template <int kDim>
struct alignas(1024) Rows {
  static constexpr int kPanels = kHeads * kDim * 2 / kPanelBytes;
  unsigned char panel[kPanels][kRows][kPanelBytes];
};

inline constexpr int kBoxPairs = 4;  // of a row: 128 bytes of a box of pairs

// A block of what a CTA goes through.
template <int kDim>
struct alignas(1024) Stage {
  unsigned char cells[kRows / kBoxPairs][kRows][kBoxPairs * kCellBytes];
  Rows<kDim> first, second;          // K and V, or Q and dO
  float2 statistics[kHeads][kRows];  // of queries
};

// kOwn: tensors of which a CTA keeps its rows. kPieces: what a lane has in the end of a head, in 16
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
  unsigned char parts[C::kPartBytes];  // what the CTAs of the cluster have of this one's heads
  Rows<C::kDim> own[C::kOwn];
  uint64_t copied[C::kStages], read[C::kStages], own_copied, summed;  // mbarriers
};

struct Maps {
  CUtensorMap q, k, v, dout;
  // All keys of a query side by side, or all queries of a key.
  CUtensorMap bias, dbias, bias_of_keys;
};

}  // namespace flashsci::sm90::pair::half
