// What the kernels of paged attention share: tile shapes, shared memory, arguments, and how the
// work is cut.
#pragma once
#include <cstdint>

#include "../../core/mask.cuh"
#include "../../core/score_mod.cuh"
#include "../../core/varlen.cuh"
#include "../../include/flashsci_paged.h"
#include "../tma_box.cuh"
#include "../tma_map.h"

namespace flashsci::sm90::paged {

inline constexpr int kRows = 64;       // of a tile: (query, head of the group) pairs
inline constexpr int kWarpRows = 16;   // of a tile: what a warp has
inline constexpr int kSmallPage = 16;  // pages are multiples of it

template <int kHeadDim_>
struct Tiling {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockK = kHeadDim == 256 ? 64 : 128;
  using CacheBox = Box<kBlockK>;
  static constexpr int kBoxes = kHeadDim / CacheBox::kColumns;
  static constexpr int kStages = kHeadDim == 64 ? 4 : 3;
  static constexpr int kQStages = kHeadDim == 256 ? 1 : 2;  // tiles whose Q is there
  static constexpr int kThreads = 192;
  static constexpr int kQBytes = kRows * kHeadDim * 2;
  static constexpr int kKVBytes = kBlockK * kHeadDim * 2;
  static_assert(kBlockK / kSmallPage * kBoxes <= 32, "a lane of the loading warp for each copy");
  static_assert(kKVBytes == kBoxes * CacheBox::kBytes, "a barrier expects what is loaded");
};

// Rows of a tile that warps compute, of which so many are there.
__device__ __forceinline__ constexpr int padded_rows(int rows) {
  return (rows + kWarpRows - 1) / kWarpRows * kWarpRows;
}

// A tile of rows, which every head of K and V has.
struct Slot {
  int sequence;     // -1: no rows
  int first_row;    // (query, head) pair in the sequence
  int first_block;  // of the keys that some row sees
  int blocks;       // at least one where there are rows, which must be written
};

// A slot and head as a CTA works on it.
struct Tile {
  Slot slot;
  int head, block, last;      // blocks [block, last) of those of the slot
  int begin;                  // of all blocks: the first of this head of the slot
  int first_q, seq_q, seq_k;  // of the sequence
};

template <class C>
struct Storage {
  unsigned char q[C::kQStages][C::kQBytes];  // [stage][64 columns][64 rows]
  unsigned char k[C::kStages][C::kKVBytes];  // [stage][64 columns][kBlockK rows]
  unsigned char v[C::kStages][C::kKVBytes];
  uint64_t k_full[C::kStages], k_empty[C::kStages];
  uint64_t v_full[C::kStages], v_empty[C::kStages];
  uint64_t q_full[C::kQStages], q_empty[C::kQStages];
  Tile tiles[C::kQStages];
};

// In the workspace, but for the numbers. plan_kernel writes slots and first.
struct Plan {
  Slot* slots;
  int* first;          // [count + 1]: blocks of all heads of the slots before
  float* partial_out;  // [CTA][2][kRows][kHeadDim], normalised: of the first and the last piece
  float* partial_lse;  // [CTA][2][kRows], log2
  int count;           // slots
  int ctas;
};

struct alignas(128) Args {
  CUtensorMap k, v;  // boxes of box_rows rows
  FlashsciPagedParams p;
  Plan plan;
  ScorePlan scores;
  int group;     // query heads of a head of K and V
  int box_rows;  // rows of a page that one copy takes
};

// The rows and keys of a sequence.
struct Sequence {
  int first_q, seq_q, seq_k;
  __device__ __forceinline__ Sequence(const FlashsciPagedParams& p, int n)
      : first_q(segment_begin(p.cu_seqlens_q, n + 1, p.sequences, p.tokens)),
        seq_q(max(segment_begin(p.cu_seqlens_q, n + 2, p.sequences, p.tokens) - first_q, 0)),
        seq_k(min(max(__ldg(p.seqused_k + n), 0), p.columns * p.page)) {}
  __device__ __forceinline__ Window window(const FlashsciPagedParams& p) const {
    return Window(p.window_left, p.window_right, true, seq_q, seq_k);
  }
};

// Blocks of all slots and heads are cut into equal runs, one for each CTA.
__device__ __forceinline__ int run_of(const Plan& plan) {
  return max((plan.first[plan.count] + plan.ctas - 1) / plan.ctas, 1);
}

// Where the partial results of a CTA's piece are that begins at block `begin` of all: a CTA has at
// most two that are not whole, one that began before it and one that ends behind it.
__device__ __forceinline__ int64_t piece_of(int cta, int run, int begin) {
  return int64_t{cta} * 2 + (begin < cta * run ? 0 : 1);
}

// The last of `count` places of which `before` holds, which it does of the first. By whole warps: a 32-ary search.
template <class Before>
__device__ __forceinline__ int last_before(int count, const Before& before) {
  const int lane = threadIdx.x % 32;
  int low = 0, high = count;
  while (high - low > 1) {
    const int step = (high - low + 31) / 32, probe = low + lane * step;
    const unsigned fails = __ballot_sync(0xffffffffu, !(probe < high && before(probe)));
    // Up to the first that fails: so the end is between one that holds and one that does not, also
    // where those before do not all hold.
    low += ((fails == 0 ? 32 : __ffs(fails) - 1) - 1) * step;
    high = min(high, low + step);
  }
  return low;
}

// A position in the blocks of all slots and heads. By whole warps.
struct Cursor {
  int at, index;  // block of all, slot
  Slot slot;
  int head, block;  // of the slot

  __device__ __forceinline__ Cursor(const Plan& plan, int at_) : at(at_) {
    // The last slot that begins at or before: the one with blocks.
    index = last_before(plan.count, [&](int i) { return plan.first[i] <= at; });
    slot = plan.slots[index];
    head = (at - plan.first[index]) / max(slot.blocks, 1);
    block = at - plan.first[index] - head * slot.blocks;
  }
  // The first block of all that this head of the slot has.
  __device__ __forceinline__ int begin() const { return at - block; }
  // Past the blocks [block, last) of this head; total: blocks of all.
  __device__ __forceinline__ void advance(const Plan& plan, int last, int heads, int total) {
    at += last - block;
    block = last;
    if (block < slot.blocks) return;
    block = 0;
    if (++head < heads) return;
    head = 0;
    if (at >= total) return;
    do slot = plan.slots[++index];
    while (slot.blocks == 0);
  }
};

}  // namespace flashsci::sm90::paged
