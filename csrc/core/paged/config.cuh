// The common part of the paged attention kernels of all generations: tile shapes, shared memory,
// arguments, and the division of the work.
#pragma once
#include <cstdint>

#include "../../include/flashsci_paged.h"
#include "../mask.cuh"
#include "../score_mod.cuh"
#include "../varlen.cuh"

namespace flashsci::paged {

inline constexpr int kRows = 64;       // per tile: (query, head of the group) pairs
inline constexpr int kWarpRows = 16;   // rows of a tile per warp
inline constexpr int kSmallPage = 16;  // pages are multiples of it
inline constexpr int kWarps = 8;       // computing warps
inline constexpr int kChunk = 16;      // keys that a warp multiplies at a time
inline constexpr int kComputingThreads = kWarps * 32;
inline constexpr int kThreads = kComputingThreads + 128;  // K, V, Q and merging have one warp each

// Roles of the warps from kWarps on.
enum Role { kLoadsKeys, kLoadsValues, kLoadsQueries, kMerges };

// kBytes: size of an element of the caches. kJoined: the two boxes of a row of K or V are
// neighbours in shared memory, as copies of whole rows write them. A generation adds its ring, its
// waiting instructions (Isa), and choices that depend on its registers and shared memory: kKeepsQ,
// Q in registers; kSharesLast, gather_few; kSlices of the columns of V, each with its own warps,
// all of which compute S; kSumColumns, the columns of a box that the warps' sums hold at a time.
template <int kHeadDim_, int kBytes_, int kBlockK_, bool kJoined_ = false>
struct Shape {
  static constexpr bool kJoined = kJoined_;
  static constexpr int kHeadDim = kHeadDim_, kBytes = kBytes_, kBlockK = kBlockK_;
  static constexpr int kColumns = kHeadDim * kBytes < 128 ? kHeadDim : 128 / kBytes;  // per box
  static constexpr int kRowBytes = kColumns * kBytes, kBoxBytes = kBlockK * kRowBytes;
  static constexpr int kBoxes = kHeadDim / kColumns;
  static constexpr int kPitch = kJoined ? kBoxes * kRowBytes : kRowBytes;  // from row to row
  static_assert(!kJoined || (kBoxes == 2 && kRowBytes == 128),
                "the order of keys in warp_tile.cuh");
  static constexpr int kKVBytes = kBlockK * kHeadDim * kBytes;
  static constexpr int kQStages = kHeadDim == 256 ? 1 : 2;  // tiles whose Q is stored at a time
  static constexpr int kQBytes = kRows * kHeadDim * 2;
};

// The number of warps that share the keys.
template <class C>
inline constexpr int kKeyWarps = kWarps / C::kSlices;

// The offset of 16 bytes of a row of K or V in a block: 8 lanes that read together have no bank
// conflicts.
template <class C>
__device__ __forceinline__ int cache_place(int box, int row, int piece) {
  const int line = C::kJoined ? row * C::kBoxes + box : row;
  return (C::kJoined ? 0 : box * C::kBoxBytes) + line * C::kRowBytes +
         (piece ^ line * C::kRowBytes / 128 % (C::kRowBytes / 16)) * 16;
}

// The number of rows of a tile that warps compute, for a given number of real rows.
__device__ __forceinline__ constexpr int padded_rows(int rows) {
  return (rows + kWarpRows - 1) / kWarpRows * kWarpRows;
}

// A tile of rows; every head of K and V has it.
struct alignas(16) Slot {
  int sequence;               // -1: no rows
  int first_row;              // (query, head) pair in the sequence
  int first_block;            // first block of keys that some row sees
  int blocks;                 // at least one if there are rows, since rows must be written
  int first_q, seq_q, seq_k;  // of the sequence
  int unused;
};

// A slot and head as a CTA works on it.
struct Tile {
  Slot slot;
  int head, block, last;  // blocks [block, last) of the slot's
  int begin;              // the slot's first block for this head, as an index into all units
  bool more;              // more tiles follow
};

// A stage of the ring.
template <class C>
struct Block {
  // [box][kBlockK rows][kColumns], joined [kBlockK rows][box][kColumns]: cache_place
  unsigned char k[C::kKVBytes], v[C::kKVBytes];
};

template <class C>
struct Storage {
  unsigned char q[C::kQStages][C::kQBytes];  // queries.cuh: query_place
  // P V of each warp's keys: all columns of few rows, or some columns of more rows at a time.
  float sums[kWarps][kWarpRows][C::kSumColumns];
  float2 statistics[kWarps][kWarpRows];                    // of the softmax: offset, sum
  float q_units[C::kQStages][C::kBytes == 1 ? kRows : 1];  // the units of Q
  float k_scale[C::kQStages], v_scale[C::kQStages];
  uint64_t k_full[C::kStages], k_empty[C::kStages];
  uint64_t v_full[C::kStages], v_empty[C::kStages];
  uint64_t q_full[C::kQStages], q_empty[C::kQStages];
  uint64_t sums_full, sums_empty;  // for tiles of few rows
  Tile tiles[C::kQStages];
  int32_t pages[2][C::kAhead][C::kCopies];             // of the next blocks: for K, for V
  alignas(C::kAlignment) Block<C> blocks[C::kStages];  // last member: there may be fewer
};

// The sequence of a CTA's blocks: how many have passed, and the next one's stage in the ring.
struct Turn {
  uint32_t count = 0, stage = 0, parity = 0;
  __device__ __forceinline__ void next(int stages) {
    ++count;
    if (++stage == static_cast<uint32_t>(stages)) stage = 0, parity ^= 1;
  }
};

// The scale of an 8-bit cache: [sequence, head of K and V], or 1 without values; times the unit of
// its widened numbers.
struct Scale {
  const float* values;
  int64_t sequence, head;  // strides
  float unit;
  __device__ __forceinline__ float at(int n, int h) const {
    return values == nullptr ? unit : unit * __ldg(values + n * sequence + h * head);
  }
};

// A tile whose beginning, but not its end, belongs to a CTA.
struct alignas(16) Cut {
  int last;  // CTA that has the end; -1: there is no such tile
  int head, first_q, first_row, rows;
};

// The plan; its arrays are in the workspace. plan_kernel writes slots and first.
struct Plan {
  Slot* slots;
  int* first;          // [count + 1]: units of the slots before, in one head
  Cut* cuts;           // [count + 1]: units before a slot, in one head
  float* partial_out;  // [CTA][2][kRows][kHeadDim], normalised: of the first and the last piece
  float* partial_lse;  // [CTA][2][kRows][kHeadDim], normalised: the first and the last piece
  int count;           // [CTA][2][kRows], log2
  int ctas;
};

struct Args {
  FlashsciPagedParams p;
  Plan plan;
  ScorePlan scores;
  Scale k_scale, v_scale;
  int group;   // query heads of a head of K and V
  int stages;  // of the ring
};

// The rows and keys of a sequence, as plan_kernel reads them.
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

// The cost of a slot for the division of the work, in units: one for each block, and one before
// them for the tile's other costs, which take as long as a block. Otherwise a CTA with many short
// sequences would finish last.
__device__ __forceinline__ int units_of(const Slot& slot) {
  return slot.blocks == 0 ? 0 : slot.blocks + 1;
}

// The units of all slots in a row, for one head after the other, are cut into equal runs, one for
// each CTA. If heads divide the number of CTAs, each CTA has one head, and the CTAs of other heads
// read the same rows of the same pages at the same time: the heads of a row are neighbours in DRAM.
// Quotients are exact: no dividend has more than 40 bits.
struct Runs {
  int units;  // of one head
  int total, ctas;
  __device__ __forceinline__ Runs(int units_, int heads, int all_ctas)
      : units(units_), total(units * heads), ctas(min(all_ctas, total)) {}
  // `cta`: up to and including the number of all; the last CTAs may have no units.
  __device__ __forceinline__ int begin(int cta) const {
    return cta >= ctas ? total : static_cast<int>(static_cast<double>(cta) * total / ctas);
  }
  // The CTA that has this unit, counted over all heads.
  __device__ __forceinline__ int cta_of(int unit) const {
    return static_cast<int>((static_cast<double>(unit + 1) * ctas - 1) / total);
  }
};

// The index of a CTA's partial results: a CTA has at most two pieces that are not whole, one that
// began before it and one that ends after it.
__device__ __forceinline__ int64_t piece_of(int cta, bool begins_there) {
  return int64_t{cta} * 2 + begins_there;
}

// The last of `count` indices for which `before` holds; it must hold for the first. Called by whole
// warps: a 32-ary search.
template <class Before>
__device__ __forceinline__ int last_before(int count, const Before& before) {
  const int lane = threadIdx.x % 32;
  int low = 0, high = count;
  while (high - low > 1) {
    const int step = (high - low + 31) / 32, probe = low + lane * step;
    const unsigned fails = __ballot_sync(0xffffffffu, !(probe < high && before(probe)));
    // Up to the first lane that fails. So the result is an index where `before` holds followed by
    // one where it does not, even if it does not hold for all indices before.
    low += ((fails == 0 ? 32 : __ffs(fails) - 1) - 1) * step;
    high = min(high, low + step);
  }
  return low;
}

// The beginning of a CTA's run.
struct Start {
  int index, unit;  // index of the slot; unit within the slot
  Slot slot;
};

// A position among the blocks of a CTA, tile after tile.
struct Cursor {
  const Slot* slots;
  int count;              // number of slots
  int at, end;            // unit over all heads, and the first unit past the CTA's
  int index;              // index of the slot
  Slot slot, next;        // the next slot is loaded during the work on this one
  int head, block, last;  // blocks [block, last) of the slot

  __device__ __forceinline__ Cursor(const Plan& plan, const Runs& runs, int begin, int end_,
                                    const Start& start)
      : slots(plan.slots),
        count(plan.count),
        at(begin + (start.unit == 0)),
        end(end_),
        index(start.index),
        slot(start.slot),
        next(slots[index + 1 < count ? index + 1 : 0]),
        head(begin / runs.units),
        block(max(start.unit - 1, 0)),
        last(min(slot.blocks, block + end - at)) {}
  // The unit of the slot's first block.
  __device__ __forceinline__ int begin() const { return at - block; }
  __device__ __forceinline__ bool done() const { return at >= end; }
  __device__ __forceinline__ void next_tile() {
    at += last - block;
    if (done()) return;
    do {
      if (++index == count) index = 0, ++head;
      slot = next;
      next = slots[index + 1 < count ? index + 1 : 0];
    } while (slot.blocks == 0);
    ++at;
    block = 0, last = min(slot.blocks, end - at);
  }
  __device__ __forceinline__ void next_block() {
    if (block + 1 == last) return next_tile();
    ++at, ++block;
  }
};

}  // namespace flashsci::paged
