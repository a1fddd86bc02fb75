// The loading warp of the triangle backward: K and V of each member, the mask of its keys, and the
// stream of Q, dO and their statistics for each consumer.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"

namespace flashsci::sm90::triangle_bwd {

// Whether a member sees this lane's key, of 32 from `key` on. Keys past the last are hidden.
__device__ __forceinline__ bool shows_key(const TriangleArgs& a, uint32_t owner, uint32_t member,
                                          int key) {
  key += threadIdx.x % 32;
  if (key >= a.p.seq_k) return false;
  if (a.p.bias_mask.mask == nullptr) return true;
  const FlashsciScoreStrides& s = a.p.bias_mask.mask_strides;
  return __ldg(a.p.bias_mask.mask + Place(a, owner, member).offset(s) + key * s.column) != 0;
}

// Loads K and V of a member, unless it is hidden. One thread.
template <class C>
__device__ __forceinline__ void load_keys(TriangleStorage<C>& shared, const TriangleArgs& a,
                                          int first_key, uint32_t slot) {
  const uint32_t full = ptx::shared_address(&shared.member_full[slot]);
  const Member& member = shared.member[slot];
  if (member.hidden) {
    ptx::mbarrier_arrive(full);
    return;
  }
  poison_stage(ptx::shared_address(shared.k[slot]), RowBox::kBytes);
  poison_stage(ptx::shared_address(shared.v[slot]), RowBox::kBytes);
  ptx::mbarrier_arrive_expect(full, sizeof(shared.k[0]) + sizeof(shared.v[0]));
  ptx::tma_load_5d(ptx::shared_address(shared.k[slot]), &a.k, full, 0, first_key, member.head,
                   member.batch1, member.batch0);
  ptx::tma_load_5d(ptx::shared_address(shared.v[slot]), &a.v, full, 0, first_key, member.head,
                   member.batch1, member.batch0);
}

// Loads a block of queries for consumer w, the count-th. One thread.
template <class C>
__device__ __forceinline__ void load_block(TriangleStorage<C>& shared, const TriangleArgs& a,
                                           const Member& member, uint32_t block, uint32_t w,
                                           uint32_t count) {
  const uint32_t stage = count % kStages;
  const uint32_t full = ptx::shared_address(&shared.q_full[w][stage]);
  const uint32_t q = ptx::shared_address(shared.q[w][stage]);
  const uint32_t dout = ptx::shared_address(shared.dout[w][stage]);
  const uint32_t statistics = ptx::shared_address(&shared.statistics[w][stage]);
  sleep_for(shared.q_empty[w][stage], count / kStages + 1);
  poison_stage(q, RowBox::kBytes);
  poison_stage(dout, RowBox::kBytes);
  poison_stage(statistics, sizeof(Statistics));
  ptx::mbarrier_arrive_expect(
      full, sizeof(shared.q[0][0]) + sizeof(shared.dout[0][0]) + sizeof(shared.statistics[0][0]));
  ptx::tma_load_5d(q, &a.q, full, 0, block * kBlock, member.head, member.batch1, member.batch0);
  ptx::tma_load_5d(dout, &a.dout, full, 0, block * kBlock, member.head, member.batch1,
                   member.batch0);
  ptx::bulk_load(statistics, a.statistics + uint64_t{member.batch_head} * a.q_blocks + block,
                 sizeof(Statistics), full);
}

// Called by a whole warp.
template <class C>
__device__ __forceinline__ void load_members(TriangleStorage<C>& shared, const TriangleArgs& a) {
  const Work work(a, blockIdx.x);
  const int first_key = work.key_block * kBlock;
  const uint32_t first_block = work.panel * C::kPanelBlocks;
  uint32_t owner = work.owner, member = work.member;
  uint32_t count = 0;  // blocks per consumer
  bool shown[2] = {shows_key(a, owner, member, first_key),
                   shows_key(a, owner, member, first_key + 32)};
  ptx::wait_for_prerequisites();  // the statistics
#pragma unroll 1
  for (uint32_t i = 0; i < work.count; ++i) {
    const uint32_t slot = i % 2;
    const uint32_t low = __ballot_sync(0xffffffffu, shown[0]);
    const uint32_t high = __ballot_sync(0xffffffffu, shown[1]);
    const bool hidden = (low | high) == 0 && first_key > 0;
    sleep_for(shared.member_empty[slot], i / 2 + 1);
    if (threadIdx.x == 0) {
      const Place at(a, owner, member);
      Member& described = shared.member[slot];
      described.batch0 = at.batch0, described.batch1 = at.batch1, described.head = at.head;
      described.batch_head =
          (at.batch0 * static_cast<uint32_t>(a.p.batch1) + at.batch1) * a.p.heads_q + at.head;
      described.keys[0] = low, described.keys[1] = high;
      described.hidden = hidden;
    }
    if (++member == a.members) member = 0, ++owner;
    if (i + 1 < work.count) {  // early enough for the next member
      shown[0] = shows_key(a, owner, member, first_key);
      shown[1] = shows_key(a, owner, member, first_key + 32);
    }
    __syncwarp();
    if (ptx::elect()) {
      load_keys(shared, a, first_key, slot);
#pragma unroll 1
      for (uint32_t block = 0; block < (hidden ? 0 : C::kPanelBlocks); ++block)
        load_block(shared, a, shared.member[slot], first_block + block, block % kConsumers,
                   count + block / kConsumers);
    }
    __syncwarp();
    if (!hidden) count += C::kSteps;
  }
}

}  // namespace flashsci::sm90::triangle_bwd
