// The schedule: units are numbered tile by tile, and a CTA takes a run of them, so that it keeps
// the bias of a tile. The members of a unit depend on the time, so that all CTAs are at
// neighbouring members, whose K and V the second-level cache then holds for all of them.
#pragma once
#include <cstdint>

#include "config.cuh"

namespace flashsci::sm90::triangle_fwd {

// Indices along the batch dimensions.
struct Batch {
  int batch0, batch1;
};

__device__ __forceinline__ uint32_t first_unit(const Plan& plan, uint32_t cta) {
  return cta * plan.units + min(cta, plan.rest);
}
__device__ __forceinline__ uint32_t cta_of(const Plan& plan, uint32_t unit) {
  const uint32_t longer = plan.rest * (plan.units + 1);  // units of CTAs with one more
  return unit < longer ? unit / (plan.units + 1) : plan.rest + (unit - longer) / plan.units;
}

// A CTA's position in its run of units.
template <class C>
struct UnitWalk {
  const Args& a;
  uint32_t unit, end, place;  // place: index of the unit in its tile
  int row, head, outer;       // first query row; index along the batch dimension that is not shared

  __device__ __forceinline__ explicit UnitWalk(const Args& a_) : a(a_) {
    unit = first_unit(a.plan, blockIdx.x);
    end = first_unit(a.plan, blockIdx.x + 1);
    enter_tile();
  }
  __device__ __forceinline__ void enter_tile() {
    const uint32_t tile = unit / a.plan.groups;
    place = unit - tile * a.plan.groups;
    const uint32_t outer_head = tile / a.plan.row_tiles;
    row = static_cast<int>(tile - outer_head * a.plan.row_tiles) * C::kBlockQ;
    outer = static_cast<int>(outer_head / static_cast<uint32_t>(a.p.heads_q));
    head = static_cast<int>(outer_head) - outer * a.p.heads_q;
  }
  __device__ __forceinline__ bool more() const { return unit < end; }
  // Whether the CTA leaves the tile of rows with this unit.
  __device__ __forceinline__ bool leaves_tile() const {
    return unit + 1 == end || place + 1 == a.plan.groups;
  }
  __device__ __forceinline__ void next() {
    ++unit, ++place;
    if (place == a.plan.groups) enter_tile();
  }
  __device__ __forceinline__ Batch batch(int member) const {
    return a.plan.member_dim == 0 ? Batch{member, outer} : Batch{outer, member};
  }
};

// The CTAs of a tile take its groups of members in time order, each for its own run: most spend all
// of the time on this tile; one arrives at the end of its run, and one leaves after the beginning
// of its run.
struct GroupOrder {
  uint32_t run;            // first unit of this CTA
  uint32_t whole, longer;  // CTAs that are here all the time; those with one more unit
  uint32_t late_from;      // arrival time of the CTA that began in the previous tile
  uint32_t early_until;    // departure time of the CTA that goes on to the next tile
  uint32_t rank;           // index of this CTA: below `whole`, or kLate or kEarly

  static constexpr uint32_t kLate = 1u << 30, kEarly = kLate + 1, kNever = ~0u;

  template <class C>
  __device__ __forceinline__ void enter_tile(const UnitWalk<C>& walk) {
    const Plan& plan = walk.a.plan;
    const uint32_t begin = walk.unit - walk.place, end = begin + plan.groups;
    uint32_t first = cta_of(plan, begin), last = cta_of(plan, end - 1);
    late_from = kNever, early_until = 0;
    run = first_unit(plan, blockIdx.x);
    rank = run < begin ? kLate : first_unit(plan, blockIdx.x + 1) > end ? kEarly : 0;
    if (first_unit(plan, last) >= begin && first_unit(plan, last + 1) > end)
      early_until = end - first_unit(plan, last--);
    if (first_unit(plan, first) < begin) late_from = begin - first_unit(plan, first++);
    whole = last + 1 - first;
    longer = min(whole, plan.rest - min(plan.rest, first));
    if (rank == 0) rank = blockIdx.x - first;
  }
  template <class C>
  __device__ __forceinline__ uint32_t group(const UnitWalk<C>& walk) const {
    const uint32_t time = walk.unit - run;
    uint32_t before = whole * time + min(time, early_until);
    if (time > late_from) before += time - late_from;
    if (rank < kLate) return before + rank;
    before += time < walk.a.plan.units ? whole : longer;
    return rank == kEarly ? before : before + (time < early_until);
  }
};

}  // namespace flashsci::sm90::triangle_fwd
