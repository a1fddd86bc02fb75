// The two producer warps of the sm90 forward: K and V; Q and the positions of the tiles.
#pragma once
#include <cstdint>

#include "../common/ptx/cp_async.cuh"
#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "layout.cuh"

namespace flashsci::sm90 {

// Index of a (batch, head) along the dims of a dense tensor.
struct HeadIndex {
  int head, batch1, batch0;
  __device__ __forceinline__ HeadIndex(const FlashsciForwardParams& p, uint32_t batch_head) {
    const uint32_t batch = batch_head / static_cast<uint32_t>(p.heads_q);
    head = batch_head - batch * p.heads_q;
    batch0 = batch / static_cast<uint32_t>(p.batch1);
    batch1 = batch - batch0 * static_cast<uint32_t>(p.batch1);
  }
};

// Loads rows [row, row + kRows); zeros beyond the tensor.
template <class C, int kRows>
__device__ __forceinline__ void load_boxes(uint32_t shared, const CUtensorMap& map, uint32_t barrier,
                                           int row, const HeadIndex& at) {
#pragma unroll
  for (int block = 0; block < C::kColumnBlocks; ++block)
    ptx::tma_load_5d(shared + block * kRows * 128, &map, barrier, block * 64, row, at.head,
                     at.batch1, at.batch0);
}

// The same of V in a packed tensor, zeros beyond the sequence too: P is 0 there, but 0 times a neighbour's NaN is
// not. (Rows of Q that are too many are not stored, those of K are masked.)
template <class C, int kRows>
__device__ __forceinline__ void load_cut_boxes(uint32_t shared, const ForwardArgs& a, uint32_t barrier,
                                               int row, const WorkTile& work, const HeadIndex& at) {
  const int rows = min(work.seq_k - row, kRows), start = work.first_k + row;
  if (rows == kRows) {
    load_boxes<C, kRows>(shared, a.v, barrier, start, at);
  } else if (start + rows >= kRows) {
#pragma unroll
    for (int block = 0; block < C::kColumnBlocks; ++block)
      ptx::tma_load_5d(shared + block * kRows * 128, &a.v_cut, barrier, block * 64, kRows - rows,
                       start + rows - kRows, at.head, 0);
  } else {  // a short first sequence: row by row, those beyond from outside the tensor
#pragma unroll 1
    for (int i = 0; i < kRows; ++i)
#pragma unroll 1
      for (int block = 0; block < C::kColumnBlocks; ++block)
        ptx::tma_load_5d(shared + (block * kRows + i) * 128, &a.v_row, barrier, block * 64,
                         i < rows ? start + i : a.p.seq_k, at.head, 0, 0);
  }
}

// The producers are one warp each, of which one elected lane issues. This one also posts every
// tile, and the end.
template <class C, bool kPacked>
__device__ __forceinline__ void produce_q(SharedStorage<C>& shared, const ForwardArgs& a) {
  uint32_t turn = 0;  // stage = turn % kQStages, lap = turn / kQStages
  for (Walk walk;; walk.advance(a.schedule)) {
    const bool more = walk.unit < a.schedule.units;
    WorkTile work;
    if (more) work = find_work<C::kBlockQ, kPacked>(a.schedule, a.p, walk.unit, walk.half);
    if (more && work.row < 0) continue;
    const uint32_t stage = turn % C::kQStages, parity = (turn / C::kQStages & 1) ^ 1;
    if (ptx::elect()) {
#pragma unroll
      for (int w = 0; w < C::kConsumers; ++w)
        ptx::mbarrier_wait(ptx::shared_address(&shared.q_empty[stage][w]), parity);
      PostedTile& post = shared.posted[turn % kPosted];
      if (more) {
        const HeadIndex at(a.p, work.batch_head);
        post.row = work.row;
        post.seq_q = work.seq_q;
        post.seq_k = work.seq_k;
        post.out_offset = at.batch0 * a.p.out_strides.batch0 + at.batch1 * a.p.out_strides.batch1 +
                          at.head * a.p.out_strides.head +
                          (work.first_q + work.row) * a.p.out_strides.row;
        post.q_offset = at.batch0 * a.p.q_strides.batch0 + at.batch1 * a.p.q_strides.batch1 +
                        at.head * a.p.q_strides.head +
                        (work.first_q + work.row) * a.p.q_strides.row;
        post.k_offset = at.batch0 * a.p.k_strides.batch0 + at.batch1 * a.p.k_strides.batch1 +
                        at.head / (a.p.heads_q / a.p.heads_k) * a.p.k_strides.head +
                        work.first_k * a.p.k_strides.row;
        post.lse_offset =
            static_cast<int64_t>(work.batch_head) * a.p.seq_q + work.first_q + work.row;
        const Blocks<C> blocks(window_of(a.p, work.seq_q, work.seq_k), work.row, C::kBlockQ,
                               work.seq_q);
        const bool load = blocks.first < blocks.end;
#pragma unroll
        for (int w = 0; w < C::kConsumers; ++w) {
          const uint32_t full = ptx::shared_address(&shared.q_full[stage][w]);
          if (load) {
            ptx::mbarrier_arrive_expect(full, C::kQBytes);
            load_boxes<C, 64>(ptx::shared_address(shared.q[stage][w]), a.q, full,
                              work.first_q + work.row + w * 64, at);
          } else {
            ptx::mbarrier_arrive(full);
          }
        }
      } else {
        post.row = -1;
#pragma unroll
        for (int w = 0; w < C::kConsumers; ++w)
          ptx::mbarrier_arrive(ptx::shared_address(&shared.q_full[stage][w]));
      }
    }
    __syncwarp();
    if (!more) break;
    ++turn;
  }
}

template <class C, bool kPacked>
__device__ __forceinline__ void produce_kv(SharedStorage<C>& shared, const ForwardArgs& a) {
  uint32_t turn = 0;  // stage = turn % kStages, lap = turn / kStages
  for (Walk walk; walk.unit < a.schedule.units; walk.advance(a.schedule)) {
    const WorkTile work = find_work<C::kBlockQ, kPacked>(a.schedule, a.p, walk.unit, walk.half);
    if (work.row < 0) continue;
    const Blocks<C> blocks(window_of(a.p, work.seq_q, work.seq_k), work.row, C::kBlockQ,
                           work.seq_q);
    if (blocks.first >= blocks.end) continue;
    const uint32_t next_turn = turn + (blocks.end - blocks.first);
    if (ptx::elect()) {
      HeadIndex at(a.p, work.batch_head);
      at.head /= static_cast<uint32_t>(a.p.heads_q / a.p.heads_k);
#pragma unroll 1
      for (int block = blocks.end - 1; block >= blocks.first; --block, ++turn) {
        const uint32_t stage = turn % C::kStages, parity = (turn / C::kStages & 1) ^ 1;
        const uint32_t k_full = ptx::shared_address(&shared.k_full[stage]);
        const uint32_t v_full = ptx::shared_address(&shared.v_full[stage]);
        ptx::mbarrier_wait(ptx::shared_address(&shared.k_empty[stage]), parity);
        ptx::mbarrier_arrive_expect(k_full, C::kKVBytes);
        load_boxes<C, C::kBlockK>(ptx::shared_address(shared.k[stage]), a.k, k_full,
                                  work.first_k + block * C::kBlockK, at);
        ptx::mbarrier_wait(ptx::shared_address(&shared.v_empty[stage]), parity);
        ptx::mbarrier_arrive_expect(v_full, C::kKVBytes);
        if constexpr (kPacked)
          load_cut_boxes<C, C::kBlockK>(ptx::shared_address(shared.v[stage]), a, v_full,
                                        block * C::kBlockK, work, at);
        else
          load_boxes<C, C::kBlockK>(ptx::shared_address(shared.v[stage]), a.v, v_full,
                                    block * C::kBlockK, at);
      }
    }
    __syncwarp();
    turn = next_turn;
  }
}

}  // namespace flashsci::sm90
