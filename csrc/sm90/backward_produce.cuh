// The copying warps of the sm90 backward: one brings K, V and the stream of Q and dO, one for each
// consumer adds its dQ to global memory.
#pragma once
#include <cstdint>

#include "../common/ptx/bulk.cuh"
#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/semaphore.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "backward_layout.cuh"

namespace flashsci::sm90 {

// kRows rows from `row` of a sequence that begins at `first` and has `length` rows; zeros beyond
// it: in the products its neighbours' NaN would survive a factor of 0.
template <class C, int kRows, bool kPacked>
__device__ __forceinline__ void load_rows(uint32_t shared, const CUtensorMap& map,
                                          const CUtensorMap& map_cut, const CUtensorMap& map_row,
                                          uint32_t barrier, int row, int first, int length,
                                          int total, int head, int batch1, int batch0) {
  const int rows = min(length - row, kRows), start = first + row;
  if (!kPacked || rows == kRows) {
#pragma unroll
    for (int block = 0; block < C::kColumnBlocks; ++block)
      ptx::tma_load_5d(shared + block * kRows * 128, &map, barrier, block * 64, start, head, batch1,
                       batch0);
  } else if (start + rows >= kRows) {
#pragma unroll
    for (int block = 0; block < C::kColumnBlocks; ++block)
      ptx::tma_load_5d(shared + block * kRows * 128, &map_cut, barrier, block * 64, kRows - rows,
                       start + rows - kRows, head, 0);
  } else {  // a short first sequence: row by row, those beyond from outside the tensor
#pragma unroll 1
    for (int i = 0; i < kRows; ++i)
#pragma unroll 1
      for (int block = 0; block < C::kColumnBlocks; ++block)
        ptx::tma_load_5d(shared + (block * kRows + i) * 128, &map_row, barrier, block * 64,
                         i < rows ? start + i : total, head, 0, 0);
  }
}

template <class C, bool kPacked>
__device__ __forceinline__ void load_tiles(BackwardStorage<C>& shared, const BackwardArgs& a,
                                           const KeyTile& tile) {
  const auto address = [](const void* x) { return ptx::shared_address(x); };
  const FlashsciBackwardParams& p = a.p;
  const auto load_q = [&](int head, int block, uint32_t turn) {
    const uint32_t stage = turn % C::kStages, full = address(&shared.q_full[stage]);
    sleep_for(shared.q_empty[stage], turn / C::kStages + 1);
    ptx::mbarrier_arrive_expect(full, C::kQBytes + C::kBlockQ * 4);
    load_rows<C, C::kBlockQ, kPacked>(address(shared.q[stage]), a.q, a.q_cut, a.q_row, full,
                                      block * C::kBlockQ, tile.first_q, tile.seq_q, p.seq_q, head,
                                      tile.batch1, tile.batch0);
    ptx::bulk_load(address(shared.lse[stage]),
                   a.lse + statistics_tile(a, tile, head, block) * C::kBlockQ, C::kBlockQ * 4,
                   full);
  };
  const auto load_dout = [&](int head, int block, uint32_t turn) {
    const uint32_t stage = turn % C::kDoutStages, full = address(&shared.dout_full[stage]);
    sleep_for(shared.dout_empty[stage], turn / C::kDoutStages + 1);
    ptx::mbarrier_arrive_expect(full, C::kQBytes + C::kBlockQ * 4);
    load_rows<C, C::kBlockQ, kPacked>(address(shared.dout[stage]), a.dout, a.dout_cut, a.dout_row,
                                      full, block * C::kBlockQ, tile.first_q + a.dout_row_offset,
                                      tile.seq_q, p.seq_q, head, tile.batch1, tile.batch0);
    ptx::bulk_load(address(shared.delta[stage]),
                   a.delta + statistics_tile(a, tile, head, block) * C::kBlockQ, C::kBlockQ * 4,
                   full);
  };
  const int heads = p.heads_q / p.heads_k;
  if (tile.begin < tile.end) {
    const uint32_t full = address(&shared.kv_full);
    ptx::mbarrier_arrive_expect(full, 2 * C::kKVBytes);
    load_rows<C, C::kBlockK, kPacked>(address(shared.k), a.k, a.k_cut, a.k_row, full, tile.row,
                                      tile.first_k, tile.seq_k, p.seq_k, tile.head, tile.batch1,
                                      tile.batch0);
    load_rows<C, C::kBlockK, kPacked>(address(shared.v), a.v, a.v_cut, a.v_row, full, tile.row,
                                      tile.first_k, tile.seq_k, p.seq_k, tile.head, tile.batch1,
                                      tile.batch0);
  }
  ptx::wait_for_prerequisites();  // lse and delta
  uint32_t turn = 0;
  for (int head = tile.head * heads; head < (tile.head + 1) * heads; ++head) {
#pragma unroll 1
    for (int block = tile.begin; block < tile.end; ++block, ++turn) {
      load_q(head, block, turn);
      load_dout(head, block, turn);
    }
  }
}

// dQ of consumer w, tile by tile.
template <class C, bool kPacked>
__device__ __forceinline__ void add_dq(BackwardStorage<C>& shared, const BackwardArgs& a,
                                       const KeyTile& tile, int w) {
  ptx::wait_for_prerequisites();  // the accumulator
  const bool come = turns_come<kPacked>(a);
  const int heads = a.p.heads_q / a.p.heads_k;
  uint32_t turn = 0;
  for (int head = tile.head * heads; head < (tile.head + 1) * heads; ++head) {
#pragma unroll 1
    for (int block = tile.begin; block < tile.end; ++block, ++turn) {
      const uint32_t stage = turn % C::kDqStages;
      sleep_for(shared.dq_full[stage][w], turn / C::kDqStages);
      if (a.p.dq != nullptr) {
        const int64_t part = statistics_tile(a, tile, head, block) * C::kConsumers + w;
        if (a.turns != nullptr && come) {
          wait_turn(a.turns + part, turn_of<C>(a, tile, block));
          ptx::fence_proxy_async_global();
        }
        ptx::bulk_add_f32(a.dq + part * C::kDqFloats, ptx::shared_address(shared.dq[stage][w]),
                          C::kDqFloats * 4);
        ptx::bulk_commit();
        if (a.turns != nullptr && come) {
          ptx::bulk_wait<0>();
          ptx::fence_proxy_async_global();
          ptx::add_release(a.turns + part, 1);
        } else {
          ptx::bulk_wait_read<C::kDqStages - 1>();
        }
      }
      // The copy before has been read (in turns this one too, which is of no use yet).
      if (turn + 1 >= C::kDqStages)
        ptx::mbarrier_arrive(ptx::shared_address(&shared.dq_empty[(turn + 1) % C::kDqStages][w]));
    }
  }
  ptx::bulk_wait<0>();
}

}  // namespace flashsci::sm90
