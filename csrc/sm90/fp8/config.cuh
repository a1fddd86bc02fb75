// The common part of the roles of the sm90 forward on 8-bit floats: tile shapes, shared memory,
// arguments, scales.
#pragma once
#include <cstdint>

#include "../../include/flashsci_fp8.h"
#include "../fwd/config.cuh"
#include "../tma_box.cuh"

namespace flashsci::sm90::fp8 {

// kHeadDim: columns of q and k; kHeadDimV: of v. A block of keys lies within one block of scales.
// kFast: O is a sum of the tensor core, and V has one scale; there is one place for Q and for V, for
// lack of memory, and a block of V comes and goes in parts, of 128 columns.
template <int kHeadDim_, int kHeadDimV_, int kBlockK_, int kConsumers_, int kStages_,
          bool kFast_ = false>
struct Tiling {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kBlockK = kBlockK_;
  static constexpr int kConsumers = kConsumers_, kStages = kStages_;
  static constexpr bool kFast = kFast_;
  static constexpr int kQStages = 2, kQPlaces = kFast ? 1 : kQStages;
  static constexpr int kVStages = kFast ? 1 : kStages, kVParts = kFast ? kHeadDimV / 128 : 1;
  static constexpr int kBlockQ = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kTransposers = 2;  // warps that transpose tiles of V
  // Bytes, and columns, of a box's row: the span of its swizzle.
  static constexpr int kSpan = kHeadDim % 128 == 0 ? 128 : 64;
  static constexpr int kSpanV = kHeadDimV % 128 == 0 ? 128 : 64;
  using QBox = Box<64, kSpan, 1>;  // per consumer
  using KBox = Box<kBlockK, kSpan, 1>;
  using VBox = Box<kBlockK, kSpanV, 1>;
  static constexpr int kQBytes = 64 * kHeadDim;  // per consumer
  static constexpr int kKBytes = kBlockK * kHeadDim, kVBytes = kBlockK * kHeadDimV;
  // Transposed V: its rows, then one row of ones, with which the product sums P, and 7 rows of
  // zeros.
  static constexpr int kTurnedBytes = kVBytes + 8 * kBlockK;
  // Output staging, in 16 bits: fwd/epilogue.cuh.
  using OutBox = Box<16>;
  static constexpr int kBoxesV = kHeadDimV / 64, kStaging = 1;
  // The registers of the launch bounds (168 at 384 threads, 128 at 512, 96 at 640) redistributed.
  static constexpr int kProducerRegisters = kFast ? 24 : kConsumers >= 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 4   ? 112
                                            : kConsumers == 3 ? 160
                                            : kFast           ? 240
                                                              : 232;
  // Causal calls with fewer keys do not repay the memset of a counter.
  static constexpr int kCountedKeys = 4096;
  static_assert(128 * kProducerRegisters + 128 * kConsumers * kConsumerRegisters <=
                    65536 / kThreads / 8 * 8 * kThreads,
                "setmaxnreg waits for ever for more registers than there are");
  static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 && (kStages & (kStages - 1)) == 0);
  static_assert(kBlockK == 64 || kBlockK == 128, "the swizzle of a row of the transposed V");
  static_assert(kTurnedBytes % (8 * kBlockK) == 0, "the swizzle's pattern, in every stage");
  static_assert(kStages * kTurnedBytes % 1024 == 0, "that of the staging behind them");
};

// A tile's record, which the scheduler publishes.
struct TileInfo : fwd::TileInfo {
  int sequence;                // packed: its index
  int first_block, end_block;  // upper bounds for the keys' blocks; of a piece: split_tail.cuh
  int piece_of;                // index of its tile among those that are cut, or -1
};
// A slot is reused when the Q of the tile two before has been released; by then the consumers may
// still have the output of the tile before that one to store.
inline constexpr int kTileSlots = 4;

template <class C>
struct Storage {
  unsigned char q[C::kQPlaces][C::kConsumers][C::kQBytes];  // [..][box][64 rows][kSpan]
  unsigned char k[C::kStages][C::kKBytes];                  // [stage][box][kBlockK rows][kSpan]
  unsigned char v[C::kVStages][C::kVParts][C::kVBytes / C::kVParts];  // [..][box][rows][kSpanV]
  unsigned char v_turned[C::kStages][C::kTurnedBytes];  // [stage][kHeadDimV + 8 rows][kBlockK]
  unsigned char staging[C::kConsumers * 4][C::kStaging][2048];  // of the output: fwd/epilogue.cuh
  uint64_t q_full[C::kQStages][C::kConsumers], q_empty[C::kQStages][C::kConsumers];
  uint64_t k_full[C::kStages], k_empty[C::kStages];
  uint64_t v_full[C::kVStages][C::kVParts], v_empty[C::kVStages][C::kVParts];
  uint64_t turned_full[C::kStages], turned_empty[C::kStages];
  float2 scales[C::kStages];        // of K and of V; stored and released with K
  uint64_t tile_ready[kTileSlots];  // published, for the loading warps; consumers learn it with Q
  TileInfo tile_info[kTileSlots];
};

// The tiles after those of the schedule, cut into a piece for each CTA: split_tail.cuh.
struct SplitTail {
  uint32_t tiles, blocks;  // blocks of keys of each tile
  uint32_t* arrived;       // [tile][warp of the consumers]
  float4* sums;            // [CTA][2][warp of the consumers][kPieceWords][lane]
};

struct Args : fwd::ForwardArgs {
  SplitTail tail;
  FlashsciScales q_scale, k_scale, v_scale;
  int out_is_fp16;
  float inverse_softcap;  // a division in the kernel would be a call
};

// The blocks of a tile, or of its piece, that rows see. piece: first and end.
template <class C, bool kVarlen>
__device__ __forceinline__ fwd::Blocks<C> blocks_of(const Window& seen, int row, int count,
                                                    int seq_q, int first, int end) {
  fwd::Blocks<C> blocks(seen, row, count, seq_q);
  if constexpr (!kVarlen)
    blocks.first = max(blocks.first, first), blocks.end = min(blocks.end, end);
  return blocks;
}

// The address of the scales of a head's sequence, which begins at first_row; NULL: all are 1.
__device__ __forceinline__ const float* first_scale(const FlashsciScales& scales,
                                                    const TileInfo& tile, int head, int first_row) {
  if (scales.data == nullptr) return nullptr;
  const int slot = scales.slots ? (first_row >> scales.shift) + tile.sequence : 0;
  return scales.data + tile.batch0 * scales.batch0 + tile.batch1 * scales.batch1 +
         head * scales.head + tile.sequence * scales.sequence + slot * scales.block;
}

// The scale of `row` and of the rows in its block.
__device__ __forceinline__ float scale_of(const FlashsciScales& scales, const float* first,
                                          int row) {
  return first == nullptr ? 1.f : __ldg(first + (row >> scales.shift) * scales.block);
}

}  // namespace flashsci::sm90::fp8
