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
inline constexpr int kWarps = 8;       // that compute
inline constexpr int kChunk = 16;      // keys that a warp multiplies at a time
inline constexpr int kComputingThreads = kWarps * 32;

// How work is cut (Runs).
inline constexpr int kFewPieceRows = 8;   // of a tile, up to which there is room for many items
inline constexpr int kMostItems = 8;      // of a CTA's share
inline constexpr int kLongItem = 64;      // units from which on an item is cut
inline constexpr int kShortestItem = 16;  // units

// Keys of a block. bytes: of an element of the caches.
constexpr int block_of(int head_dim, int bytes) { return bytes == 1 ? 128 : 8192 / head_dim; }

template <int kHeadDim_, int kBytes_>  // of an element of the caches
struct Tiling {
  static constexpr int kHeadDim = kHeadDim_, kBytes = kBytes_;
  static constexpr int kColumns = kHeadDim * kBytes < 128 ? kHeadDim : 128 / kBytes;  // of a box
  static constexpr int kRowBytes = kColumns * kBytes;
  static constexpr int kBlockK = block_of(kHeadDim, kBytes);
  using CacheBox = Box<kBlockK, kColumns, kBytes>;
  static constexpr int kBoxes = kHeadDim / kColumns;
  static constexpr int kStages = kBytes == 2 ? 5 : kHeadDim == 64 ? 8 : kHeadDim == 128 ? 4 : 2;
  static constexpr int kQStages = kHeadDim == 256 ? 1 : 2;  // tiles whose Q is there
  static constexpr bool kKeepsQ = kHeadDim <= 128;          // in registers
  static constexpr int kThreads = kComputingThreads + 128;  // registers move by warpgroups
  // Up to head dim 128, what these threads leave of the registers is enough for a CTA of
  // combine_kernel, which then waits beside this one.
  static constexpr bool kLeavesRoom = kHeadDim <= 128;
  static constexpr int kRegisters = kLeavesRoom ? 144 : 168;  // of a thread when it begins
  static constexpr int kComputingRegisters = kLeavesRoom ? 176 : 216;
  static constexpr int kLoadingRegisters = kLeavesRoom ? 80 : 72;
  static_assert(kComputingThreads * kComputingRegisters + 128 * kLoadingRegisters <=
                    kThreads * kRegisters,
                "a warp that asks for more waits for ever");
  static constexpr int kQBytes = kRows * kHeadDim * 2;
  static constexpr int kKVBytes = kBlockK * kHeadDim * kBytes;
  static constexpr int kCopies = kBlockK / kSmallPage * kBoxes;  // of a block, at most
  static constexpr int kAhead = kBytes == 1 ? 3 : 6;  // blocks whose pages are looked up before
  // Rows of a tile that one warp puts together: as many as there is room for with all their columns
  // where 16 rows have those of a box.
  static constexpr int kFewRows = kWarpRows / kBoxes < 8 ? kWarpRows / kBoxes : 8;
  static constexpr bool kSharesLast = kHeadDim <= 128;  // gather_few: there are registers for it
  // So that the item after the next is not asked for while the one before it has blocks left.
  static_assert(kShortestItem > 2 * kAhead + 1, "of two units at least one is a block");
  static_assert(kCopies <= 32, "a lane of the loading warps for each copy");
  static_assert(kKVBytes == kBoxes * CacheBox::kBytes, "a barrier expects what is loaded");
};

// Rows of a tile that warps compute, of which so many are there.
__device__ __forceinline__ constexpr int padded_rows(int rows) {
  return (rows + kWarpRows - 1) / kWarpRows * kWarpRows;
}

// A tile of rows, which every head of K and V has.
struct alignas(16) Slot {
  int sequence;               // -1: no rows
  int first_row;              // (query, head) pair in the sequence
  int first_block;            // of the keys that some row sees
  int blocks;                 // at least one where there are rows, which must be written
  int first_q, seq_q, seq_k;  // of the sequence
  int unused;
};

// A slot and head as a CTA works on it.
struct Tile {
  Slot slot;
  int head, block,
      last;   // blocks [block, last) of those of the slot; none: there are no more tiles
  int begin;  // of all units: that of the slot's first block for this head
  int item;
  bool ends;  // the item
  bool more;  // tiles to come, or it is not known yet
};

// What a CTA takes at a time.
struct alignas(16) Item {
  int number, begin, end;  // units [begin, end) of all; none: there is nothing left
  int head, index, unit;   // where it begins: head, slot, which of the slot's units
  Slot slot;
};

template <class C>
struct Storage {
  unsigned char q[C::kQStages][C::kQBytes];  // queries.cuh: query_place
  unsigned char k[C::kStages][C::kKVBytes];  // [stage][kColumns][kBlockK rows]
  unsigned char v[C::kStages][C::kKVBytes];
  // P V of each warp's keys: of few rows all columns, of more those of a box at a time.
  float sums[kWarps][kWarpRows][C::kColumns];
  float2 statistics[kWarps][kWarpRows];  // of their softmax: offset, sum
  // The power of two that Q is a multiple of, by its exponent with an offset of 127.
  uint8_t q_units[C::kQStages][C::kBytes == 1 ? kRows : 1];
  float k_scale[C::kQStages], v_scale[C::kQStages];
  uint64_t k_full[C::kStages], k_empty[C::kStages];
  uint64_t v_full[C::kStages], v_empty[C::kStages];
  uint64_t q_full[C::kQStages], q_empty[C::kQStages];
  uint64_t sums_full, sums_empty;  // of few rows
  uint64_t item_full, item_empty;
  Tile tiles[C::kQStages];
  Item item;                                // that comes next
  int32_t pages[2][C::kAhead][C::kCopies];  // of the blocks to come: for K, for V
};

// Of 8-bit caches: [sequence, head of K and V], or none, 1.
struct Scale {
  const float* values;
  int64_t sequence, head;  // strides
  __device__ __forceinline__ float at(int n, int h) const {
    return values == nullptr ? 1.f : __ldg(values + n * sequence + h * head);
  }
};

// A tile of which an item has the beginning, but not the end.
struct alignas(16) Cut {
  int last;  // item that has the end; -1: there is no such tile
  int head, first_q, first_row, rows;
};

// Items as CTAs take them. A workspace has any contents: no number may be taken before `ready`, which
// is set by CTA 0 and taken back by combine_kernel. What lies there by chance is not kReady.
inline constexpr uint64_t kReady = 0x9d4b7c31e85fa62bu;
struct alignas(16) Counter {
  uint64_t ready;
  uint32_t taken;
  int items;  // of all
};

// In the workspace, but for the numbers. plan_kernel writes slots and first.
struct Plan {
  Slot* slots;
  int*
      first;  // [count + 2]: units of the slots before, in one head; whether all tiles have few rows
  Counter* counter;
  Cut* cuts;           // [item]
  float* partial_out;  // [piece's row][kHeadDim], normalised
  float* partial_lse;  // [piece's row], log2
  int count;           // slots
  int ctas;
};

struct alignas(128) Args {
  CUtensorMap k, v;  // boxes of box_rows rows
  FlashsciPagedParams p;
  Plan plan;
  ScorePlan scores;
  Scale k_scale, v_scale;
  int group;     // query heads of a head of K and V
  int box_rows;  // rows of a page that one copy takes
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

// What a CTA is given work by: a unit for each block, and one before them for what else a tile costs,
// which is as long as a block. Else a CTA with many short sequences would be the last.
__device__ __forceinline__ int units_of(const Slot& slot) {
  return slot.blocks == 0 ? 0 : slot.blocks + 1;
}

// `total` things in equal parts: the first ones have one more, where they are not quite equal.
struct Even {
  int size, larger;  // how many have one more
  __device__ __forceinline__ Even(int total, int parts)
      : size(total / max(parts, 1)), larger(total - size * parts) {}
  __device__ __forceinline__ int begin(int part) const { return part * size + min(part, larger); }
  __device__ __forceinline__ int part_of(int x) const {
    const int after = x - larger * (size + 1);
    return after < 0 ? x / (size + 1) : larger + after / max(size, 1);
  }
};

// Units of the slots in a row, for one head after the other, are cut into items. If heads nearly
// divide the number of CTAs, each head has the same number of items, and those of all heads at one
// place are worked on at the same time: rows of heads lie side by side in DRAM.
//
// Each CTA has one item to begin with. Where these are long, and few rows leave little behind, they
// have three quarters of the units, and the rest is cut into more: CTAs take the next as they get
// there, since the memory serves SMs at speeds that differ by a fifth.
struct Runs {
  int units;        // of one head
  int groups;       // of items: one for each head, or one
  int each;         // units of a group
  int first;        // items of a group that CTAs begin with
  int first_units;  // which these have
  int rest;         // the other items of a group
  __device__ __forceinline__ Runs(int units_, int heads, int ctas, bool few)
      : units(units_),
        groups(ctas % heads * 16 <= ctas ? heads : 1),
        each(units * (heads / groups)),
        first(min(ctas / groups, each)),
        first_units(each),
        rest(0) {
    if (few && each >= int64_t{first} * kLongItem) {
      const int left = each / 4;
      first_units = each - left;
      rest = min((kMostItems - 1) * ctas / groups, left / kShortestItem);
    }
  }
  __device__ __forceinline__ int items() const { return groups * (first + rest); }
  // The number of the item that a CTA begins with, or has taken next, or -1.
  __device__ __forceinline__ int number(int turn) const {
    if (turn < groups * first) return turn / first * (first + rest) + turn % first;
    const int later = turn - groups * first;
    return later < groups * rest ? later % groups * (first + rest) + first + later / groups : -1;
  }
  // The first unit of an item.
  __device__ __forceinline__ int begin(int number) const {
    const int group = number / (first + rest), place = number % (first + rest);
    return group * each + (place < first
                               ? Even(first_units, first).begin(place)
                               : first_units + Even(each - first_units, rest).begin(place - first));
  }
  // The item that has this unit of all.
  __device__ __forceinline__ int item_of(int unit) const {
    const int group = unit / each, within = unit % each;
    const int place = within < first_units
                          ? Even(first_units, first).part_of(within)
                          : first + Even(each - first_units, rest).part_of(within - first_units);
    return group * (first + rest) + place;
  }
};

// Where a row of an item's piece is: an item has at most two pieces of tiles that are not whole, one
// that began before it and one that ends behind it. Only few rows have more items than CTAs.
__device__ __forceinline__ int64_t piece_row(const Plan& plan, int item, bool begins_there, int r) {
  const int64_t piece = int64_t{item} * 2 + begins_there;
  const int64_t before = r < kFewPieceRows ? 0 : int64_t{plan.ctas} * 2 * (kMostItems - 1);
  return (before + r / kFewPieceRows * int64_t{plan.ctas} * 2 + piece) * kFewPieceRows +
         r % kFewPieceRows;
}
inline constexpr int kPieceRows = kRows + (kMostItems - 1) * kFewPieceRows;  // of a CTA, times 2

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

// A position in the blocks of an item, tile after tile.
struct Cursor {
  const Plan& plan;
  int at, end;            // unit of all, and the first that is not the item's
  int index;              // of the slot
  Slot slot, following;   // this one is on its way while that one is worked on
  int head, block, last;  // blocks [block, last) of the slot

  __device__ __forceinline__ Cursor(const Plan& plan_, const Item& item) : plan(plan_) {
    begin(item);
  }
  __device__ __forceinline__ void begin(const Item& item) {
    at = item.begin + (item.unit == 0), end = item.end;
    index = item.index, slot = item.slot, head = item.head;
    block = max(item.unit - 1, 0), last = min(slot.blocks, block + end - at);
    look_ahead();
  }
  __device__ __forceinline__ void look_ahead() {
    following = plan.slots[index + 1 < plan.count ? index + 1 : 0];
  }
  // The unit of the slot's first block.
  __device__ __forceinline__ int first_unit() const { return at - block; }
  __device__ __forceinline__ bool done() const { return at >= end; }
  __device__ __forceinline__ void next_tile() {
    at += last - block;
    if (done()) return;
    do {
      if (++index == plan.count) index = 0, ++head;
      slot = following;
      look_ahead();
    } while (slot.blocks == 0);
    ++at;
    block = 0, last = min(slot.blocks, end - at);
  }
  __device__ __forceinline__ void next_block() {
    if (block + 1 == last) return next_tile();
    ++at, ++block;
  }
};

}  // namespace flashsci::sm90::paged
