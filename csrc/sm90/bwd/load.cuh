// The copying warps of the sm90 backward: one brings K, V and the stream of Q and dO; for each
// consumer one adds its dQ to global memory.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../core/smem_tile.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"

namespace flashsci::sm90::bwd {

// Fills a stage: rows from `row` of a sequence that begins at `first` and has `length` rows, and
// zeros beyond it: in the products a neighbour's NaN would survive a factor of 0.
// column(box): the first column of a box.
template <class B, bool kVarlen, int kSize, class Column>
__device__ __forceinline__ void load_boxes(const unsigned char (&stage)[kSize],
                                           const Column& column, const CUtensorMap& map,
                                           const CUtensorMap& map_cut, const CUtensorMap& map_row,
                                           uint32_t barrier, int row, int first, int length,
                                           int total, int head, int batch1, int batch0) {
  constexpr int kBoxes = kSize / B::kBytes, kRows = B::kRows;
  static_assert(kSize == kBoxes * B::kBytes && B::kBytes == kRows * Box<1>::kBytes,
                "the barrier expects the whole stage, whichever way it is filled");
  const uint32_t shared = ptx::shared_address(stage);
  const int rows = min(length - row, kRows), start = first + row;
  if (!kVarlen || rows == kRows) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      ptx::tma_load_5d(shared + box * kRows * 128, &map, barrier, column(box), start, head, batch1,
                       batch0);
  } else if (start + rows >= kRows) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      ptx::tma_load_5d(shared + box * kRows * 128, &map_cut, barrier, column(box), kRows - rows,
                       start + rows - kRows, head, 0);
  } else {  // a short first sequence: row by row; rows beyond it come from outside the tensor
#pragma unroll 1
    for (int i = 0; i < kRows; ++i)
#pragma unroll 1
      for (int box = 0; box < kBoxes; ++box)
        ptx::tma_load_5d(shared + (box * kRows + i) * 128, &map_row, barrier, column(box),
                         i < rows ? start + i : total, head, 0, 0);
  }
}

template <class B, bool kVarlen, int kSize, class... Arguments>
__device__ __forceinline__ void load_rows(const unsigned char (&stage)[kSize],
                                          const Arguments&... arguments) {
  load_boxes<B, kVarlen>(stage, [](int box) { return box * 64; }, arguments...);
}

// Loads K, V and the stream of Q and dO of a tile, the count-th of this CTA.
template <class C, bool kVarlen>
__device__ __forceinline__ void load_tile(BackwardStorage<C>& shared, const BackwardArgs& a,
                                          const KeyTile& tile, uint32_t count) {
  const auto address = [](const void* x) { return ptx::shared_address(x); };
  const FlashsciBackwardParams& p = a.p;
  const int heads = p.heads_q / p.heads_k;
  const int batch1 = kVarlen ? 0 : tile.batch1, batch0 = kVarlen ? 0 : tile.batch0;
  uint32_t iter = 0;
  if constexpr (C::kManyTiles) iter = shared.queue.blocks;
  const auto load_q = [&](int head, int block) {
    const uint32_t stage = iter % C::kStages, full = address(&shared.q_full[stage]);
    sleep_for(shared.q_empty[stage], iter / C::kStages + 1);
    poison_stage(address(shared.q[stage]), C::kQBytes);
    poison_stage(address(shared.lse[stage]), C::kBlockQ * 4);
    if constexpr (C::kManyTiles)
      shared.queue.block[stage] =
          block_and_flags<C>(a, tile, block, block == tile.begin && head == tile.head * heads,
                             block + 1 == tile.end && head + 1 == (tile.head + 1) * heads);
    ptx::mbarrier_arrive_expect(full, sizeof(shared.q[0]) + sizeof(shared.lse[0]));
    load_rows<typename C::QBox, kVarlen>(shared.q[stage], a.q, a.q_cut, a.q_row, full,
                                         block * C::kBlockQ, tile.first_q, tile.seq_q, p.seq_q,
                                         head, batch1, batch0);
    ptx::bulk_load(address(shared.lse[stage]),
                   a.lse + statistics_tile(a, tile, head, block) * C::kBlockQ,
                   sizeof(shared.lse[0]), full);
  };
  const auto load_dout = [&](int head, int block) {
    const uint32_t stage = iter % C::kDoutStages, full = address(&shared.dout_full[stage]);
    sleep_for(shared.dout_empty[stage], iter / C::kDoutStages + 1);
    poison_stage(address(shared.dout[stage]), C::kDoutBytes);
    poison_stage(address(shared.delta[stage]), C::kBlockQ * 4);
    ptx::mbarrier_arrive_expect(full, sizeof(shared.dout[0]) + sizeof(shared.delta[0]));
    load_rows<typename C::QBox, kVarlen>(shared.dout[stage], a.dout, a.dout_cut, a.dout_row, full,
                                         block * C::kBlockQ, tile.first_q + a.dout_row_offset,
                                         tile.seq_q, p.seq_q, head, batch1, batch0);
    ptx::bulk_load(address(shared.delta[stage]),
                   a.delta + statistics_tile(a, tile, head, block) * C::kBlockQ,
                   sizeof(shared.delta[0]), full);
  };
  const auto load_kv = [&] {
    const uint32_t full = address(&shared.kv_full);
    if constexpr (C::kManyTiles) sleep_for(shared.queue.kv_empty, count + 1);
    poison_stage(address(shared.k), C::kKBytes);
    poison_stage(address(shared.v), C::kVBytes);
    int rank = 0;
    if constexpr (C::kCtas > 1) rank = static_cast<int>(ptx::cluster_rank());
    const int row = tile.row + rank * C::kKeys;
    if constexpr (C::kCtas > 1)
      ptx::mbarrier_arrive_expect(full,
                                  sizeof(shared.k) + sizeof(shared.v) + sizeof(shared.peer_k));
    else
      ptx::mbarrier_arrive_expect(full, sizeof(shared.k) + sizeof(shared.v));
    load_rows<typename C::KBox, kVarlen>(shared.k, a.k, a.k_cut, a.k_row, full, row, tile.first_k,
                                         tile.seq_k, p.seq_k, tile.head, batch1, batch0);
    load_rows<typename C::KBox, kVarlen>(shared.v, a.v, a.v_cut, a.v_row, full, row, tile.first_k,
                                         tile.seq_k, p.seq_k, tile.head, batch1, batch0);
    if constexpr (C::kCtas > 1)
      load_boxes<typename C::KBox, kVarlen>(
          shared.peer_k, [=](int box) { return C::dq_begin(rank, box) / 64 * 64; }, a.k, a.k_cut,
          a.k_row, full, tile.row + (rank ^ 1) * C::kKeys, tile.first_k, tile.seq_k, p.seq_k,
          tile.head, batch1, batch0);
  };
  const bool some = tile.begin < tile.end;
  // The first K and V do not wait for the previous kernel; later ones wait longer for a free stage
  // than Q does.
  const bool late = C::kManyTiles && !kVarlen && count > 0 && some;
  if ((C::kManyTiles || some) && !late) load_kv();
  ptx::wait_for_prerequisites();  // lse and delta
#pragma unroll 1
  for (int head = tile.head * heads; head < (tile.head + 1) * heads; ++head) {
#pragma unroll 1
    for (int block = tile.begin; block < tile.end; ++block, ++iter) {
      load_q(head, block);
      load_dout(head, block);
      if (late && head == tile.head * heads && block == tile.begin) load_kv();
    }
  }
  if constexpr (C::kManyTiles) shared.queue.blocks = iter;
}

// One warp: takes key tiles one after the other, publishes them, and loads their operands.
template <class C, bool kVarlen>
__device__ __forceinline__ void load_tiles(BackwardStorage<C>& shared, const BackwardArgs& a) {
  auto& queue = shared.queue;
  const uint32_t tiles = opaque(a.key_heads) * a.k_tiles;
  // The first tile is known, except in turns: there no tile may be taken before the tiles that it
  // waits for.
  const auto take = [&] {
    ptx::wait_for_prerequisites();
    const uint32_t taken = threadIdx.x == 0 ? atomicAdd(a.handed_out, 1u) : 0;
    return __shfl_sync(0xffffffffu, taken, 0);
  };
  uint32_t item = a.known != 0 ? blockIdx.x : take();
#pragma unroll 1
  for (;;) {
    const uint32_t count = *const_cast<volatile uint32_t*>(&queue.tiles);
    KeyTile& tile = shared.tile[count % 2];
    sleep_for(queue.tile_empty[count % 2], count / 2 + 1);
    const bool some = item < tiles;
    if (some) {
      const KeyTile found = find_key_tile<C, kVarlen>(a, item);
      if (kVarlen && found.row < 0) {
        item = take();
        continue;
      }
      if (threadIdx.x == 0) tile = found;
    } else if (threadIdx.x == 0) {
      tile.row = -1;
    }
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive(ptx::shared_address(&queue.tile_full[count % 2]));
      if (some) load_tile<C, kVarlen>(shared, a, tile, count);
      ++*const_cast<volatile uint32_t*>(&queue.tiles);
    }
    __syncwarp();
    if (!some) break;
    item = take();
  }
}

}  // namespace flashsci::sm90::bwd
