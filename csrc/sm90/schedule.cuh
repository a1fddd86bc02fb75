// Which query tiles a CTA works on, in which order. All roles of the CTA walk the same list.
//
// A unit is one tile, or (causal) the pair of the m-th longest and the m-th shortest tile of a head, so that all
// units cost the same and a static round robin is balanced. Heads come in sections whose K and V fit L2; inside a
// section the tiles of all its heads with the same index come together.
#pragma once
#include <cstdint>

#include "../common/window.cuh"
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

struct WorkTile {
  int row;                   // first query row
  int batch_head;            // index of (batch0, batch1, head)
  int first_key, end_key;    // keys that any row of the tile sees; none if first_key >= end_key
};

// The `half`-th tile of a unit; row < 0: there is none.
template <int kBlockQ>
__device__ __forceinline__ WorkTile find_work(const SchedulePlan& plan, const FlashsciForwardParams& p,
                                              uint32_t unit, uint32_t half) {
  const uint32_t section = unit / (plan.section_heads * plan.units_per_head);
  const uint32_t first_head = section * plan.section_heads;
  const uint32_t heads = min(plan.section_heads, plan.heads - first_head);
  const uint32_t in_section = unit - first_head * plan.units_per_head;
  const uint32_t index = in_section / heads;
  WorkTile work;
  work.batch_head = first_head + in_section - index * heads;
  const uint32_t mirrored = plan.tiles_per_head - 1 - index;
  const uint32_t tile = (plan.descending != 0) != (half != 0) ? mirrored : index;
  work.row = half != 0 && mirrored == index ? -1 : static_cast<int>(tile) * kBlockQ;
  return work;
}

}  // namespace flashsci::sm90
