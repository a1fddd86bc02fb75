// The query tiles that a CTA works on, and their order. Its producer walks the list and posts every
// tile to the consumers.
//
// Tiles of one cost (no causal mask): item i is tile i % tiles of head i / tiles, CTA c takes c, c
// + grid, ...; the tiles of a head come together, so that its K and V stay in L2. Causal tiles grow
// with their position. With a counter in the workspace, CTAs take the next item as they become
// free: groups of heads whose K and V fit L2, in a group the longest first. Without one, item 2 u +
// half is a tile of unit u. All units cost the same: the longest tile of one head and the shortest
// of the next, the second longest and the second shortest, ... Packed: item i is slot i % tiles
// (core/varlen.cuh) of head i / tiles.
#pragma once
#include <cstdint>

#include "../../core/varlen.cuh"
#include "../../include/flashsci.h"

namespace flashsci::sm90::fwd {

enum class Order { kAsIs, kBalanced, kLongestFirst };

struct SchedulePlan {
  uint32_t items;
  uint32_t tiles_per_head;  // packed: slots
  uint32_t heads;           // B0 * B1 * Hq
  uint32_t group;           // kLongestFirst: heads whose tiles are mixed
  Order order;
  bool descending;    // packed: the last tile of a sequence first
  uint32_t* counter;  // items taken beyond the first of every CTA; or NULL: a static list
};

// A query tile of one sequence.
struct WorkTile {
  int row;              // first query row in its sequence; < 0: no work
  uint32_t batch_head;  // index of (batch0, batch1, head)
  int first_q, seq_q;   // the sequence's rows (dense: 0 and the parameter)
  int first_k, seq_k;   // its keys
};

__device__ __forceinline__ uint32_t first_item(const SchedulePlan& plan) {
  return plan.order == Order::kBalanced ? 2 * blockIdx.x : blockIdx.x;
}

// The item after `item`; taken: the value from the counter, if there is one.
__device__ __forceinline__ uint32_t next_item(const SchedulePlan& plan, uint32_t item,
                                              uint32_t taken) {
  if (plan.counter != nullptr) return gridDim.x + taken;
  if (plan.order == Order::kBalanced) return item % 2 == 0 ? item + 1 : item - 1 + 2 * gridDim.x;
  return item + gridDim.x;
}

// Packed: a whole warp must call it.
template <int kBlockQ, bool kVarlen>
__device__ __forceinline__ WorkTile find_work(const SchedulePlan& plan,
                                              const FlashsciForwardParams& p, uint32_t item) {
  const uint32_t tiles = plan.tiles_per_head;
  WorkTile work;
  uint32_t index;  // tile of the head, or slot
  if (!kVarlen && plan.order == Order::kBalanced) {
    // Rotated by one from round to round, so that the units of a CTA have different positions.
    const uint32_t unit = item / 2, half = item % 2, two_heads = unit / tiles;
    const uint32_t m = (unit - two_heads * tiles + two_heads * tiles / gridDim.x) % tiles;
    index = half == 0 ? tiles - 1 - m : m;
    work.batch_head = two_heads * 2 + half;
  } else if (!kVarlen && plan.order == Order::kLongestFirst) {
    const uint32_t first_head = item / (plan.group * tiles) * plan.group;
    const uint32_t rest = item - first_head * tiles;
    const uint32_t count = min(plan.group, plan.heads - first_head);
    index = tiles - 1 - rest / count;
    work.batch_head = first_head + rest % count;
  } else {
    work.batch_head = item / tiles;
    index = item - work.batch_head * tiles;
  }
  if constexpr (kVarlen) {
    const TileOfSequence found = find_tile<kBlockQ>(static_cast<int>(index), p.cu_seqlens_q,
                                                    p.cu_seqlens_k, p.num_seqs, p.seq_q, p.seq_k);
    work.first_q = found.first_q, work.seq_q = found.seq_q;
    work.first_k = found.first_k, work.seq_k = found.seq_k;
    const int count = (found.seq_q + kBlockQ - 1) / kBlockQ;
    const bool inside = found.tile >= 0 && found.tile < count;
    work.row = inside ? (plan.descending ? count - 1 - found.tile : found.tile) * kBlockQ : -1;
  } else {
    work.first_q = work.first_k = 0;
    work.seq_q = p.seq_q, work.seq_k = p.seq_k;
    work.row = work.batch_head < plan.heads ? static_cast<int>(index) * kBlockQ : -1;
  }
  return work;
}

}  // namespace flashsci::sm90::fwd
