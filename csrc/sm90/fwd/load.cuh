// The scheduler and the producer of the sm90 forward, a warp each.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"

namespace flashsci::sm90::fwd {

// Index of a (batch, head) along the dims of a dense tensor.
struct KvHeadCoord {
  int head, head_k, batch1, batch0;
  __device__ __forceinline__ KvHeadCoord(const FlashsciForwardParams& p, uint32_t batch_head) {
    const uint32_t batch = batch_head / static_cast<uint32_t>(p.heads_q);
    head = batch_head - batch * p.heads_q;
    head_k = static_cast<uint32_t>(head) / static_cast<uint32_t>(p.heads_q / p.heads_k);
    batch0 = batch / static_cast<uint32_t>(p.batch1);
    batch1 = batch - batch0 * static_cast<uint32_t>(p.batch1);
  }
};

__device__ __forceinline__ uint32_t fetch_next(const SchedulePlan& plan) {
  return plan.counter != nullptr ? atomicAdd(plan.counter, 1) : 0;
}

// Fills a stage of kSize bytes with rows [row, row + B::kRows), one box after the other; zeros
// beyond the tensor.
template <class B, int kSize, class Coord>
__device__ __forceinline__ void load_boxes(uint32_t shared, const CUtensorMap& map,
                                           uint32_t barrier, int row, int head, const Coord& at) {
  static_assert(kSize % B::kBytes == 0, "the barrier expects the whole stage");
#pragma unroll
  for (int box = 0; box < kSize / B::kBytes; ++box)
    ptx::tma_load_5d(shared + box * B::kBytes, &map, barrier, box * B::kColumns, row, head,
                     at.batch1, at.batch0);
}

// The same for V in a packed tensor, with zeros beyond the sequence too: P is 0 there, but 0 times
// a neighbour's NaN is NaN. (Excess rows of Q are not stored, those of K are masked.)
template <class C, int kSize>
__device__ __forceinline__ void load_cut_boxes(uint32_t shared, const ForwardArgs& a,
                                               uint32_t barrier, int row, const TileInfo& tile) {
  using B = typename C::KBox;
  constexpr int kRows = B::kRows;
  static_assert(kSize == C::kBoxesV * B::kBytes && B::kBytes == kRows * Box<1>::kBytes,
                "the barrier expects the whole stage, whichever way it is filled");
  const int rows = min(tile.seq_k - row, kRows), start = tile.first_k + row;
  if (rows == kRows) {
    load_boxes<B, kSize>(shared, a.v, barrier, start, tile.head_k, tile);
  } else if (start + rows >= kRows) {
#pragma unroll
    for (int box = 0; box < C::kBoxesV; ++box)
      ptx::tma_load_5d(shared + box * kRows * 128, &a.v_cut, barrier, box * 64, kRows - rows,
                       start + rows - kRows, tile.head_k, 0);
  } else {  // a short first sequence: row by row; rows beyond it come from outside the tensor
#pragma unroll 1
    for (int i = 0; i < kRows; ++i)
#pragma unroll 1
      for (int box = 0; box < C::kBoxesV; ++box)
        ptx::tma_load_5d(shared + (box * kRows + i) * 128, &a.v_row, barrier, box * 64,
                         i < rows ? start + i : a.p.seq_k, tile.head_k, 0, 0);
  }
}

// Walks the list of tiles ahead of the loads, since its divisions take as long as a block: posts
// every tile, and the end, and loads its Q. One warp, of which one elected lane issues.
template <class C, bool kVarlen>
__device__ __forceinline__ void schedule_tiles(SharedStorage<C>& shared, const ForwardArgs& a) {
  const auto address = [](const void* x) { return ptx::shared_address(x); };
  uint32_t tiles = 0;  // published: Q stage = tiles % kQStages, phase = tiles / kQStages
  uint32_t taken = 0;
  const auto wait_q = [&] {  // until the Q of the tile kQStages before has been read
#pragma unroll
    for (int w = 0; w < C::kConsumers; ++w)
      ptx::mbarrier_sleep(address(&shared.q_empty[tiles % C::kQStages][w]),
                          (tiles / C::kQStages & 1) ^ 1);
  };
  for (uint32_t item = first_item(a.schedule);; item = next_item(a.schedule, item, taken)) {
    const bool more = item < a.schedule.items;
    WorkTile work{};
    work.row = -1;
    if (more) work = find_work<C::kBlockQ, kVarlen>(a.schedule, a.p, item);
    const Blocks<C> blocks(window_of(a.p, work.seq_q, work.seq_k), work.row, C::kBlockQ,
                           work.seq_q);
    const bool posts = !more || work.row >= 0;
    if (posts && ptx::elect()) {
      const KvHeadCoord at(a.p, more ? work.batch_head : 0);
      wait_q();
      TileInfo& tile = shared.tile_info[tiles % kTileSlots];
      tile.row = work.row;
      tile.head = at.head, tile.head_k = at.head_k;
      tile.batch1 = at.batch1, tile.batch0 = at.batch0;
      tile.first_q = work.first_q, tile.first_k = work.first_k;
      tile.seq_q = work.seq_q, tile.seq_k = work.seq_k;
      ptx::mbarrier_arrive(address(&shared.tile_ready[tiles % kTileSlots]));
      const uint32_t stage = tiles % C::kQStages;
#pragma unroll
      for (int w = 0; w < C::kConsumers; ++w) {
        const uint32_t full = address(&shared.q_full[stage][w]);
        poison_stage(address(shared.q[stage][w]), C::kQBytes);
        if (work.row >= 0 && blocks.end > blocks.first) {
          ptx::mbarrier_arrive_expect(full, sizeof(shared.q[0][0]));
          load_boxes<typename C::QBox, sizeof(shared.q[0][0])>(
              address(shared.q[stage][w]), a.q, full, work.first_q + work.row + w * 64, at.head,
              at);
        } else {
          ptx::mbarrier_arrive(full);
        }
      }
    }
    __syncwarp();
    if (!more) break;
    tiles += posts;
    if (a.schedule.counter != nullptr) {
      // When the consumers have begun the last tile: an item taken here is lost to other CTAs.
      wait_q();
      taken = __shfl_sync(0xffffffffu, threadIdx.x % 32 == 0 ? fetch_next(a.schedule) : 0, 0);
    }
  }
}

// Loads K and V of the published tiles. One thread.
template <class C, bool kVarlen>
__device__ __forceinline__ void load_kv(SharedStorage<C>& shared, const ForwardArgs& a) {
  const auto address = [](const void* x) { return ptx::shared_address(x); };
  uint32_t turn = 0;  // blocks loaded: stage = turn % kStages, phase = turn / kStages
#pragma unroll 1
  for (uint32_t tiles = 0;; ++tiles) {
    ptx::mbarrier_sleep(address(&shared.tile_ready[tiles % kTileSlots]), tiles / kTileSlots & 1);
    const TileInfo& tile = shared.tile_info[tiles % kTileSlots];
    if (tile.row < 0) break;
    const int seq_q = kVarlen ? tile.seq_q : a.p.seq_q, seq_k = kVarlen ? tile.seq_k : a.p.seq_k;
    const Window window = window_of(a.p, seq_q, seq_k);
    const Blocks<C> blocks(window, tile.row, C::kBlockQ, seq_q);
    int own_first[C::kConsumers], own_end[C::kConsumers];  // blocks that a consumer sees
#pragma unroll
    for (int w = 0; w < C::kConsumers; ++w) {
      const Blocks<C> own(window, tile.row + w * 64, 64, seq_q);
      own_first[w] = own.first, own_end[w] = own.end;
    }
    // Waits for a free stage and pre-arrives for the consumers that skip this block.
    const auto acquire = [&](uint64_t* empty, int block) {
      const uint32_t barrier = address(&empty[turn % C::kStages]);
      ptx::mbarrier_sleep(barrier, (turn / C::kStages & 1) ^ 1);
      uint32_t skipping = 0;
#pragma unroll
      for (int w = 0; w < C::kConsumers; ++w)
        skipping += block < own_first[w] || block >= own_end[w];
      if (skipping > 0) ptx::mbarrier_arrive(barrier, 4 * skipping);
    };
#pragma unroll 1
    for (int block = blocks.end - 1; block >= blocks.first; --block, ++turn) {
      const uint32_t stage = turn % C::kStages;
      const uint32_t k_full = address(&shared.k_full[stage]);
      acquire(shared.k_empty, block);
      poison_stage(address(shared.k[stage]), C::kKBytes);
      ptx::mbarrier_arrive_expect(k_full, sizeof(shared.k[0]));
      load_boxes<typename C::KBox, sizeof(shared.k[0])>(address(shared.k[stage]), a.k, k_full,
                                                        tile.first_k + block * C::kBlockK,
                                                        tile.head_k, tile);
      const uint32_t v_full = address(&shared.v_full[stage]);
      acquire(shared.v_empty, block);
      poison_stage(address(shared.v[stage]), C::kVBytes);
      ptx::mbarrier_arrive_expect(v_full, sizeof(shared.v[0]));
      if constexpr (kVarlen)
        load_cut_boxes<C, sizeof(shared.v[0])>(address(shared.v[stage]), a, v_full,
                                               block * C::kBlockK, tile);
      else
        load_boxes<typename C::KBox, sizeof(shared.v[0])>(address(shared.v[stage]), a.v, v_full,
                                                          block * C::kBlockK, tile.head_k, tile);
    }
    // The published record is not overwritten before this warp, too, has released Q.
    ptx::mbarrier_arrive(address(&shared.q_empty[tiles % C::kQStages][0]));
  }
}

}  // namespace flashsci::sm90::fwd
