// The producer warp of tiles with one stage of Q.
#pragma once
#include "load.cuh"
#include "load_bias_mask.cuh"

namespace flashsci::sm90::fwd {

// For each consumer, the blocks that it sees among the blocks of a tile.
template <class C>
struct OwnBlocks {
  int first[C::kConsumers], end[C::kConsumers];
  __device__ __forceinline__ OwnBlocks(const Window& window, int row, int seq_q) {
#pragma unroll
    for (int w = 0; w < C::kConsumers; ++w) {
      const Blocks<C> own(window, row + w * 64, 64, seq_q);
      first[w] = own.first, end[w] = own.end;
    }
  }
  __device__ __forceinline__ uint32_t skipped_by(int block) const {
    uint32_t skipping = 0;
#pragma unroll
    for (int w = 0; w < C::kConsumers; ++w) skipping += block < first[w] || block >= end[w];
    return skipping;
  }
};

// Publishes a tile, or the end, to the consumers, and loads its Q if it sees any keys.
template <class C>
__device__ __forceinline__ void post_tile(SharedStorage<C>& shared, const ForwardArgs& a,
                                          const uint32_t& tiles, const WorkTile& work,
                                          const bool& more, const int& count,
                                          const KvHeadCoord& at) {
  const auto address = [](const void* x) { return ptx::shared_address(x); };
  const uint32_t stage = tiles % C::kQStages;
#pragma unroll
  for (int w = 0; w < C::kConsumers; ++w)
    ptx::mbarrier_sleep(address(&shared.q_empty[stage][w]), (tiles / C::kQStages & 1) ^ 1);
  TileInfo& tile = shared.tile_info[tiles % kTileSlots];
  tile.row = more ? work.row : -1;
  tile.head = at.head, tile.head_k = at.head_k, tile.batch1 = at.batch1, tile.batch0 = at.batch0;
  tile.first_q = work.first_q, tile.first_k = work.first_k;
  tile.seq_q = work.seq_q, tile.seq_k = work.seq_k;
#pragma unroll
  for (int w = 0; w < C::kConsumers; ++w) {
    const uint32_t full = address(&shared.q_full[stage][w]);
    poison_stage(address(shared.q[stage][w]), C::kQBytes);
    if (count > 0) {
      ptx::mbarrier_arrive_expect(full, sizeof(shared.q[0][0]));
      load_boxes<typename C::QBox, sizeof(shared.q[0][0])>(
          address(shared.q[stage][w]), a.q, full, work.first_q + work.row + w * 64, at.head, at);
    } else {
      ptx::mbarrier_arrive(full);
    }
  }
}

// Scheduler and producer in one warp: with one stage of Q the scheduler cannot run ahead, and at D
// 256 a second loading warp delays K and V (measured: 4 to 7 %).
template <class C, bool kVarlen>
__device__ __forceinline__ void load_and_schedule(SharedStorage<C>& shared, const ForwardArgs& a) {
  const auto address = [](const void* x) { return ptx::shared_address(x); };
  uint32_t tiles = 0;  // published: Q stage = tiles % kQStages, phase = tiles / kQStages
  BiasMaskRing ring;
  uint32_t turn = 0;  // blocks loaded: stage = turn % kStages, phase = turn / kStages
  for (uint32_t item = first_item(a.schedule);;) {
    const bool more = item < a.schedule.items;
    WorkTile work{};
    if (more) work = find_work<C::kBlockQ, kVarlen>(a.schedule, a.p, item);
    const Window window = window_of(a.p, work.seq_q, work.seq_k);
    const Blocks<C> blocks(window, work.row, C::kBlockQ, work.seq_q);
    const int count = more && work.row >= 0 ? blocks.end - blocks.first : 0;
    const OwnBlocks<C> own(window, work.row, work.seq_q);
    uint32_t taken = 0;
    if (ptx::elect()) {
      KvHeadCoord at(a.p, more ? work.batch_head : 0);
      const auto post = [&] { post_tile(shared, a, tiles, work, more, count, at); };
      // Waits for a free stage and pre-arrives for the consumers that skip this block.
      const auto acquire = [&](uint64_t* empty, uint32_t at_turn, int block) {
        const uint32_t barrier = address(&empty[at_turn % C::kStages]);
        ptx::mbarrier_sleep(barrier, (at_turn / C::kStages & 1) ^ 1);
        const uint32_t skipping = own.skipped_by(block);
        if (skipping > 0) ptx::mbarrier_arrive(barrier, 4 * skipping);
      };
      const auto load_k = [&](uint32_t at_turn, int block) {
        const uint32_t stage = at_turn % C::kStages, full = address(&shared.k_full[stage]);
        acquire(shared.k_empty, at_turn, block);
        poison_stage(address(shared.k[stage]), C::kKBytes);
        ptx::mbarrier_arrive_expect(full, sizeof(shared.k[0]));
        load_boxes<typename C::KBox, sizeof(shared.k[0])>(
            address(shared.k[stage]), a.k, full, work.first_k + block * C::kBlockK, at.head_k, at);
        if constexpr (C::kHasBiasMask)
          load_bias_mask<C>(shared, a, ring, own.skipped_by(block), work.row, block, at);
      };
      int block = blocks.end - 1;
      // With two stages of Q the next one is free; a single stage becomes free later than a stage
      // of K.
      if (C::kQStages == 1 && count > 0) load_k(turn, block);
      if (!more || work.row >= 0) post();
#pragma unroll 1
      for (int i = 0; i < count; ++i, --block) {
        if (i == count - 1) taken = fetch_next(a.schedule);  // used after the waits below
        if (C::kQStages > 1 || i > 0) load_k(turn + i, block);
        const uint32_t stage = (turn + i) % C::kStages, full = address(&shared.v_full[stage]);
        acquire(shared.v_empty, turn + i, block);
        poison_stage(address(shared.v[stage]), C::kVBytes);
        ptx::mbarrier_arrive_expect(full, sizeof(shared.v[0]));
        if constexpr (kVarlen)
          load_cut_boxes<C, sizeof(shared.v[0])>(address(shared.v[stage]), a, full,
                                                 block * C::kBlockK,
                                                 shared.tile_info[tiles % kTileSlots]);
        else
          load_boxes<typename C::KBox, sizeof(shared.v[0])>(address(shared.v[stage]), a.v, full,
                                                            block * C::kBlockK, at.head_k, at);
      }
      if (count == 0 && more) taken = fetch_next(a.schedule);
    }
    __syncwarp();
    if (!more) break;
    turn += count;
    tiles += work.row >= 0;
    item = next_item(a.schedule, item, ptx::redux_max(taken));
  }
}

}  // namespace flashsci::sm90::fwd
