// Which query tiles a CTA works on, in which order. All roles of the CTA walk the same list.
//
// A unit is one tile, or (causal) the pair of the m-th longest and the m-th shortest tile of a head, so that all
// units cost the same and a static round robin is balanced. Heads come in sections whose K and V fit L2; inside a
// section the tiles of all its heads with the same index come together.
#pragma once
#include <cstdint>

#include "../common/sequence.cuh"
#include "../include/flashsci.h"

namespace flashsci::sm90 {

struct SchedulePlan {
  uint32_t units, units_per_head;
  uint32_t tiles_per_head;
  uint32_t heads;          // B0 * B1 * Hq
  uint32_t section_heads;
  uint32_t pairs;          // 1: a unit is two tiles
  uint32_t descending;     // longest tiles first
};

// A query tile of one sequence.
struct WorkTile {
  int row;              // first query row in its sequence; < 0: nothing to do
  uint32_t batch_head;  // index of (batch0, batch1, head)
  int first_q, seq_q;   // the sequence's rows (dense: 0 and the parameter)
  int first_k, seq_k;   // its keys
};

// The `half`-th tile of a unit. Packed: of the slot `unit` (sequence.cuh); a whole warp must call it.
template <int kBlockQ, bool kPacked>
__device__ __forceinline__ WorkTile find_work(const SchedulePlan& plan, const FlashsciForwardParams& p,
                                              uint32_t unit, uint32_t half) {
  const uint32_t section = unit / (plan.section_heads * plan.units_per_head);
  const uint32_t first_head = section * plan.section_heads;
  const uint32_t heads = min(plan.section_heads, plan.heads - first_head);
  const uint32_t in_section = unit - first_head * plan.units_per_head;
  const uint32_t index = in_section / heads;
  WorkTile work;
  work.batch_head = first_head + in_section - index * heads;
  if constexpr (kPacked) {
    const TileOfSequence found =
        find_tile<kBlockQ>(static_cast<int>(index), p.cu_seqlens_q, p.cu_seqlens_k, p.num_seqs,
                           p.seq_q, p.seq_k);
    work.first_q = found.first_q, work.seq_q = found.seq_q;
    work.first_k = found.first_k, work.seq_k = found.seq_k;
    const int tiles = (found.seq_q + kBlockQ - 1) / kBlockQ;
    const bool inside = found.tile >= 0 && found.tile < tiles;
    work.row = inside ? (plan.descending != 0 ? tiles - 1 - found.tile : found.tile) * kBlockQ : -1;
  } else {
    work.first_q = work.first_k = 0;
    work.seq_q = p.seq_q, work.seq_k = p.seq_k;
    const uint32_t mirrored = plan.tiles_per_head - 1 - index;
    const uint32_t tile = (plan.descending != 0) != (half != 0) ? mirrored : index;
    work.row = half != 0 && mirrored == index ? -1 : static_cast<int>(tile) * kBlockQ;
  }
  return work;
}

}  // namespace flashsci::sm90
