// The common part of the roles of the sm90 forward: tile shapes, shared memory, arguments, the walk
// over tiles.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../../core/mask.cuh"
#include "../../core/score_mod.cuh"
#include "../../include/flashsci.h"
#include "../tma_box.cuh"
#include "../tma_map.h"
#include "scheduler.cuh"

namespace flashsci::sm90::fwd {

// kHeadDim: columns of q and k; kHeadDimV: of v.
template <int kHeadDim_, int kBlockK_, int kConsumers_, int kStages_, bool kHasBiasMask_ = false,
          int kHeadDimV_ = kHeadDim_>
struct Tiling {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockK = kBlockK_, kConsumers = kConsumers_, kStages = kStages_;
  static constexpr bool kHasBiasMask = kHasBiasMask_;       // with bias or mask
  static constexpr int kQStages = kHeadDim <= 128 ? 2 : 1;  // limited by the shared memory of an SM
  // Whether it takes rows of a bias that begin anywhere (load_bias_mask.cuh): other tiles have no
  // registers to spare.
  static constexpr bool kHasLattice = kHasBiasMask && kQStages > 1 && kConsumers < 4;
  static constexpr int kBlockQ = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStaging =
      kHeadDim <= 64 || kConsumers == 3 || kHeadDim != kHeadDimV || kHasBiasMask ? 1 : 2;
  static constexpr int kBoxes = (kHeadDim + 63) / 64, kBoxesV = (kHeadDimV + 63) / 64;
  using QBox = Box<64>;  // per consumer
  using KBox = Box<kBlockK>;
  using OutBox = Box<16>;
  static constexpr int kQBytes = 64 * kBoxes * 128;  // per consumer
  static constexpr int kKBytes = kBlockK * kBoxes * 128, kVBytes = kBlockK * kBoxesV * 128;
  // The registers of the launch bounds (168 at 384 threads, 128 at 512, 96 at 640) redistributed.
  static constexpr int kProducerRegisters = kConsumers >= 3 ? 32 : kHasBiasMask ? 40 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 4   ? 112
                                            : kConsumers == 3 ? 160
                                            : kHasBiasMask    ? 232
                                                              : 240;
  // Number of scores whose exponentials come before the wait for P V of the previous block.
  static constexpr int kEarly = kHeadDim <= 64 ? 0 : kBlockK / 4;
  // Causal calls with fewer keys do not repay the memset of a counter.
  static constexpr int kCountedKeys = kHeadDim == 256 ? 8192 : 2048;
  // With a bias: blocks skip the search for their maximum once every row has seen a key.
  static constexpr bool kOptimistic = kHasBiasMask && kHeadDim <= 128;
  // For the stages of bias and mask, of which the number that fits is used: BiasMaskPlan.
  static constexpr int kBiasMaskBytes = (kHeadDim > 64 ? 80 : kConsumers == 4 ? 96 : 120) * 1024;
  static_assert(!kHasBiasMask || kBlockK == 32 || kBlockK == 64);
  static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0 && kBlockK % 16 == 0 &&
                (kStages & (kStages - 1)) == 0);
};

// A tile's record, which the scheduler publishes.
struct TileInfo {
  int row;               // first query row in its sequence; < 0: no more tiles
  int seq_q, seq_k;      // of the sequence
  int first_q, first_k;  // where the sequence begins
  int head, head_k, batch1, batch0;
};
// A slot is reused when the Q of the tile two before has been released; by then the consumers may
// still have the output of the tile before that one to store.
inline constexpr int kTileSlots = 4;

// Keys of a box of the bias.
template <class C>
constexpr __host__ __device__ int bias_box_keys(int is_fp32) {
  return is_fp32 ? 32 : C::kBlockK;
}

// Rows of a bias that begin anywhere (load_bias_mask.cuh): the base-2 logarithm of the number of
// their classes, and the bytes of a row in a box, an odd number of 16 bytes.
constexpr __host__ __device__ int lattice_bits(int is_fp32) { return is_fp32 ? 2 : 3; }
template <class C>
constexpr __host__ __device__ int lattice_row_bytes(int is_fp32) {
  static_assert(C::kBlockK % 16 == 0);
  return C::kBlockK * (is_fp32 ? 4 : 2) + 16;
}

// Largest number of stages of bias and mask.
inline constexpr int kBiasMaskStages = 8;

template <class C, bool kHasBiasMask = C::kHasBiasMask>
struct BiasMaskStorage {};
template <class C>
struct BiasMaskStorage<C, true> {  // bias_mask.cuh
  unsigned char bias_mask[C::kBiasMaskBytes];
};

template <class C>
struct SharedStorage : BiasMaskStorage<C> {
  unsigned char q[C::kQStages][C::kConsumers][C::kQBytes];  // [..][box][64 rows][64]
  unsigned char k[C::kStages][C::kKBytes];                  // [stage][box][kBlockK rows][64]
  unsigned char v[C::kStages][C::kVBytes];                  // the same
  // Output staging: [warp][64 columns, in turn][16 rows][64], swizzled.
  unsigned char staging[C::kConsumers * 4][C::kStaging][2048];
  uint64_t q_full[C::kQStages][C::kConsumers], q_empty[C::kQStages][C::kConsumers];
  uint64_t k_full[C::kStages], k_empty[C::kStages];
  uint64_t v_full[C::kStages], v_empty[C::kStages];
  uint64_t bias_mask_full[kBiasMaskStages], bias_mask_empty[kBiasMaskStages];
  uint64_t tile_ready[kTileSlots];  // published, for the producer; consumers learn it with Q
  TileInfo tile_info[kTileSlots];
};

// The layout of bias and mask of a block in their stage. All in bytes, multiples of 1024.
struct BiasMaskPlan {
  int stages, stage_bytes;
  int bias_rows, mask_rows;  // rows of a box: 64, or 1 if all rows are the same
  int bias_step, mask_step;  // from one consumer to the next; 0 if all rows are the same
  int box_step;              // from 32 keys of an fp32 bias to the next 32, or as below
  int mask;                  // first byte of the mask
  int loaded;                // bytes of the boxes that arrive per stage
  // If rows of the bias begin anywhere (load_bias_mask.cuh):
  int boxes;             // in a stage, box_step bytes apart, multiples of 128; otherwise 0
  int rows[4];           // flat rows from a row, head, batch1, batch0 to the next
  uint32_t pitch, base;  // bytes, modulo 16: from a flat row to the next, before the first one
  template <class Coord>
  __device__ __forceinline__ int flat_row(const Coord& at, int row) const {
    return row * rows[0] + at.head * rows[1] + at.batch1 * rows[2] + at.batch0 * rows[3];
  }
};

// A role's position in the ring of bias and mask.
struct BiasMaskRing {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(const BiasMaskPlan& plan) {
    if (++stage == plan.stages) stage = 0, ++phase;
  }
};

struct alignas(128) ForwardArgs {
  CUtensorMap q, k, v;
  CUtensorMap out;           // boxes of 16 rows
  CUtensorMap v_cut, v_row;  // packed: load_cut_boxes
  // Boxes of their rows and 128 or 64 bytes, present if the tensors are. A bias has one map, or one
  // for each class of its rows: load_bias_mask.cuh.
  CUtensorMap bias[8], mask;
  FlashsciForwardParams p;
  SchedulePlan schedule;
  BiasMaskPlan bias_mask;
  ScorePlan scores;
};
static_assert(sizeof(ForwardArgs) <= 4096, "the parameters of a kernel");

// Key blocks [first, end) that some of the rows [row, row + count) see.
template <class C>
struct Blocks {
  int first, end;
  int end_key;  // the first key past those that the rows see
  __device__ __forceinline__ Blocks(const Window& window, int row, int count, int seq_q) {
    const int last_row = min(row + count, seq_q) - 1;
    const int begin_key = window.begin(row);
    end_key = window.end(last_row);
    first = begin_key / C::kBlockK;
    end = begin_key < end_key && row <= last_row ? (end_key + C::kBlockK - 1) / C::kBlockK : first;
  }
};

__device__ __forceinline__ int64_t offset_of(const FlashsciStrides& strides, const TileInfo& tile,
                                             int head, int row) {
  return tile.batch0 * strides.batch0 + tile.batch1 * strides.batch1 + head * strides.head +
         row * strides.row;
}

__device__ __forceinline__ Window window_of(const FlashsciForwardParams& p, int seq_q, int seq_k) {
  return Window(p.window_left, p.window_right, p.lower_right != 0, seq_q, seq_k);
}

}  // namespace flashsci::sm90::fwd
