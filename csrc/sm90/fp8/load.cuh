// The scheduler and the producer of the sm90 forward on 8-bit floats, a warp each.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../fwd/load.cuh"
#include "config.cuh"
#include "split_tail.cuh"

namespace flashsci::sm90::fp8 {

using fwd::Blocks;
using fwd::WorkTile;

// The sequence of an item of a packed call. A whole warp must call it.
template <class C>
__device__ __forceinline__ int sequence_of(const Args& a, uint32_t item) {
  const uint32_t slot = item % a.schedule.tiles_per_head;
  const TileOfSequence found =
      find_tile<C::kBlockQ>(static_cast<int>(slot), a.p.cu_seqlens_q, a.p.cu_seqlens_k,
                            a.p.num_seqs, a.p.seq_q, a.p.seq_k);
  return min(max(found.segment - 1, 0), max(a.p.num_seqs - 1, 0));
}

// Publishes a tile, or the end, and loads its Q; if there is one place for Q, when the tile before
// has left it. One thread.
template <class C>
__device__ __forceinline__ void post_tile(Storage<C>& shared, const Args& a, uint32_t tiles,
                                          const WorkTile& work, int sequence, int first_block,
                                          int end_block, int piece_of) {
  const auto address = [](const void* x) { return ptx::shared_address(x); };
  const fwd::KvHeadCoord at(a.p, work.row >= 0 ? work.batch_head : 0);
  TileInfo& tile = shared.tile_info[tiles % kTileSlots];
  tile.row = work.row;
  tile.head = at.head, tile.head_k = at.head_k;
  tile.batch1 = at.batch1, tile.batch0 = at.batch0;
  tile.first_q = work.first_q, tile.first_k = work.first_k;
  tile.seq_q = work.seq_q, tile.seq_k = work.seq_k;
  tile.sequence = sequence;
  tile.first_block = first_block, tile.end_block = end_block, tile.piece_of = piece_of;
  ptx::mbarrier_arrive(address(&shared.tile_ready[tiles % kTileSlots]));
  const Blocks<C> blocks(fwd::window_of(a.p, work.seq_q, work.seq_k), work.row, C::kBlockQ,
                         work.seq_q);
  const uint32_t stage = tiles % C::kQStages, place = tiles % C::kQPlaces;
#pragma unroll
  for (int w = 0; w < C::kConsumers; ++w) {
    const uint32_t full = address(&shared.q_full[stage][w]);
    if (work.row >= 0 && blocks.end > blocks.first) {
      if (C::kQPlaces < C::kQStages && tiles > 0)
        ptx::mbarrier_sleep(address(&shared.q_empty[(tiles - 1) % C::kQStages][w]),
                            (tiles - 1) / C::kQStages & 1);
      poison_stage(address(shared.q[place][w]), C::kQBytes);
      ptx::mbarrier_arrive_expect(full, sizeof(shared.q[0][0]));
      fwd::load_boxes<typename C::QBox, sizeof(shared.q[0][0])>(
          address(shared.q[place][w]), a.q, full, work.first_q + work.row + w * 64, at.head, at);
    } else {
      ptx::mbarrier_arrive(full);
    }
  }
}

// Walks the list of tiles ahead of the loads, since its divisions take as long as a block. One
// warp, of which one elected lane posts.
template <class C, bool kVarlen>
__device__ __forceinline__ void schedule_tiles(Storage<C>& shared, const Args& a) {
  uint32_t tiles = 0;  // published: Q stage = tiles % kQStages, phase = tiles / kQStages
  uint32_t taken = 0;
  const auto wait_q = [&] {  // until the Q of the tile kQStages before has been read
#pragma unroll
    for (int w = 0; w < C::kConsumers; ++w)
      ptx::mbarrier_sleep(ptx::shared_address(&shared.q_empty[tiles % C::kQStages][w]),
                          (tiles / C::kQStages & 1) ^ 1);
  };
  Run run(a.tail);
  for (uint32_t item = fwd::first_item(a.schedule);;
       item = fwd::next_item(a.schedule, item, taken)) {
    bool more = item < a.schedule.items;
    uint32_t index = item;
    int first_block = 0, end_block = INT32_MAX, piece_of = -1;
    if (!kVarlen && !more && !run.done()) {
      piece_of = run.take(a.tail, first_block, end_block);
      index = a.schedule.items + piece_of, more = true;
    }
    WorkTile work{};
    work.row = -1;
    int sequence = 0;
    if (more) {
      work = fwd::find_work<C::kBlockQ, kVarlen>(a.schedule, a.p, index);
      if constexpr (kVarlen) sequence = sequence_of<C>(a, item);
    }
    const bool posts = !more || work.row >= 0;
    if (posts && ptx::elect()) {
      wait_q();
      post_tile<C>(shared, a, tiles, work, sequence, first_block, end_block, piece_of);
    }
    __syncwarp();
    if (!more) break;
    tiles += posts;
    if (a.schedule.counter != nullptr) {
      // When the consumers have begun the last tile: an item taken here is lost to other CTAs.
      wait_q();
      taken = __shfl_sync(0xffffffffu, threadIdx.x % 32 == 0 ? fwd::fetch_next(a.schedule) : 0, 0);
    }
  }
}

// The scales of K and V of a block.
template <class C>
struct BlockScales {
  const float *k, *v;  // of the sequence
  __device__ __forceinline__ BlockScales(const Args& a, const TileInfo& tile)
      : k(first_scale(a.k_scale, tile, tile.head_k, tile.first_k)),
        v(first_scale(a.v_scale, tile, tile.head_k, tile.first_k)) {}
  __device__ __forceinline__ float2 of(const Args& a, int block) const {
    const int key = block * C::kBlockK;
    return make_float2(scale_of(a.k_scale, k, key), scale_of(a.v_scale, v, key));
  }
};

// Loads a block of V, in parts.
template <class C>
__device__ __forceinline__ void load_v(Storage<C>& shared, const Args& a, uint32_t turn, int row,
                                       int head, const TileInfo& tile) {
  using B = typename C::VBox;
  constexpr int kBytes = sizeof(shared.v[0][0]);
  static_assert(kBytes % B::kBytes == 0, "the barrier expects the whole part");
  const uint32_t stage = turn % C::kVStages, free = (turn / C::kVStages & 1) ^ 1;
#pragma unroll
  for (int part = 0; part < C::kVParts; ++part) {
    const uint32_t full = ptx::shared_address(&shared.v_full[stage][part]);
    const uint32_t v = ptx::shared_address(shared.v[stage][part]);
    ptx::mbarrier_sleep(ptx::shared_address(&shared.v_empty[stage][part]), free);
    poison_stage(v, kBytes);
    ptx::mbarrier_arrive_expect(full, sizeof(shared.v[0][0]));
#pragma unroll
    for (int at = 0; at < kBytes; at += B::kBytes)
      ptx::tma_load_5d(v + at, &a.v, full, (part * kBytes + at) / B::kRows, row, head, tile.batch1,
                       tile.batch0);
  }
}

// Loads K and V of the published tiles, and their scales. One thread.
template <class C, bool kVarlen>
__device__ __forceinline__ void load_kv(Storage<C>& shared, const Args& a) {
  const auto address = [](const void* x) { return ptx::shared_address(x); };
  uint32_t turn = 0;  // blocks loaded: stage = turn % kStages, phase = turn / kStages
#pragma unroll 1
  for (uint32_t tiles = 0;; ++tiles) {
    ptx::mbarrier_sleep(address(&shared.tile_ready[tiles % kTileSlots]), tiles / kTileSlots & 1);
    const TileInfo& tile = shared.tile_info[tiles % kTileSlots];
    if (tile.row < 0) break;
    const int seq_q = kVarlen ? tile.seq_q : a.p.seq_q, seq_k = kVarlen ? tile.seq_k : a.p.seq_k;
    const auto blocks = blocks_of<C, kVarlen>(fwd::window_of(a.p, seq_q, seq_k), tile.row,
                                              C::kBlockQ, seq_q, tile.first_block, tile.end_block);
    const BlockScales<C> scales(a, tile);
    float2 next = make_float2(1.f, 1.f);  // a block ahead, so that nothing waits for them
    if (blocks.end > blocks.first) next = scales.of(a, blocks.end - 1);
#pragma unroll 1
    for (int block = blocks.end - 1; block >= blocks.first; --block, ++turn) {
      const float2 own = next;
      if (block > blocks.first) next = scales.of(a, block - 1);
      const uint32_t stage = turn % C::kStages, free = (turn / C::kStages & 1) ^ 1;
      const int row = tile.first_k + block * C::kBlockK;
      const uint32_t k_full = address(&shared.k_full[stage]);
      ptx::mbarrier_sleep(address(&shared.k_empty[stage]), free);
      poison_stage(address(shared.k[stage]), C::kKBytes);
      shared.scales[stage] = own;
      ptx::mbarrier_arrive_expect(k_full, sizeof(shared.k[0]));
      fwd::load_boxes<typename C::KBox, sizeof(shared.k[0])>(address(shared.k[stage]), a.k, k_full,
                                                             row, tile.head_k, tile);
      load_v(shared, a, turn, row, tile.head_k, tile);
    }
    // The published record is not overwritten before this warp, too, has released Q.
    ptx::mbarrier_arrive(address(&shared.q_empty[tiles % C::kQStages][0]));
  }
}

}  // namespace flashsci::sm90::fp8
