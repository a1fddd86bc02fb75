// Which query tiles a CTA works on, in which order. All roles of the CTA walk the same list.
//
// A unit is one tile, or (causal) the pair of the m-th longest and the m-th shortest tile of a
// head, so that all units cost the same and a static round robin is balanced. The tiles of a head
// come together: its K and V stay in L2.
#pragma once
#include <cstdint>

#include "../common/sequence.cuh"
#include "../include/flashsci.h"

namespace flashsci::sm90 {

struct SchedulePlan {
  uint32_t units;
  uint32_t tiles_per_head;  // packed: slots
  uint32_t heads;           // B0 * B1 * Hq
  uint32_t pairs;           // 1: a unit is two tiles
  uint32_t descending;      // packed: the last tile of a sequence first
};

// A query tile of one sequence.
struct WorkTile {
  int row;              // first query row in its sequence; < 0: nothing to do
  uint32_t batch_head;  // index of (batch0, batch1, head)
  int first_q, seq_q;   // the sequence's rows (dense: 0 and the parameter)
  int first_k, seq_k;   // its keys
};

// The `half`-th tile of a unit. Packed: of the slot `unit` (sequence.cuh); a whole warp must call
// it.
template <int kBlockQ, bool kPacked>
__device__ __forceinline__ WorkTile find_work(const SchedulePlan& plan,
                                              const FlashsciForwardParams& p, uint32_t unit,
                                              uint32_t half) {
  const uint32_t tiles = plan.tiles_per_head;
  WorkTile work;
  uint32_t index;  // tile of the head, or slot
  if (!kPacked && plan.pairs != 0) {
    // Units 0 .. tiles - 1 of two heads: the pairs of one, those of the other, and their middle
    // tiles if any.
    const uint32_t two_heads = unit / tiles, rest = unit - two_heads * tiles, per_head = tiles / 2;
    const bool middle = rest == 2 * per_head;
    const bool second_head = middle ? half != 0 : rest >= per_head;
    const uint32_t pair = middle ? per_head : second_head ? rest - per_head : rest;
    index = half == 0 ? tiles - 1 - pair : pair;
    work.batch_head = two_heads * 2 + second_head;
  } else {
    work.batch_head = unit / tiles;
    index = unit - work.batch_head * tiles;
  }
  if constexpr (kPacked) {
    const TileOfSequence found = find_tile<kBlockQ>(static_cast<int>(index), p.cu_seqlens_q,
                                                    p.cu_seqlens_k, p.num_seqs, p.seq_q, p.seq_k);
    work.first_q = found.first_q, work.seq_q = found.seq_q;
    work.first_k = found.first_k, work.seq_k = found.seq_k;
    const int count = (found.seq_q + kBlockQ - 1) / kBlockQ;
    const bool inside = found.tile >= 0 && found.tile < count;
    work.row = inside ? (plan.descending != 0 ? count - 1 - found.tile : found.tile) * kBlockQ : -1;
  } else {
    work.first_q = work.first_k = 0;
    work.seq_q = p.seq_q, work.seq_k = p.seq_k;
    work.row = work.batch_head < plan.heads ? static_cast<int>(index) * kBlockQ : -1;
  }
  return work;
}

}  // namespace flashsci::sm90
