// The loading warps of paged attention: tiles of K and V, gathered page by page, and of Q.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "config.cuh"

namespace flashsci::sm90::paged {

// One tile: each lane copies box_rows rows of a box's columns from the page that it has found.
// box_rows divides kBlockK and kBoxes boxes have kHeadDim columns, so that they fill the stage.
template <class C, class Shared>
__device__ __forceinline__ void load_tile(const Shared& shared, const unsigned char* tile,
                                          uint64_t& full, uint64_t& empty, uint32_t parity,
                                          const CUtensorMap& map, const Args& a, int page,
                                          int page_row, int head) {
  const int lane = threadIdx.x % 32, box = lane / C::kBoxes, columns = lane % C::kBoxes;
  ptx::mbarrier_sleep(ptx::shared_address(&empty), parity);
  if (lane == 0) {
    poison_stage(ptx::shared_address(tile), C::kKVBytes);
    ptx::mbarrier_arrive_expect(ptx::shared_address(&full), sizeof(shared.k[0]));
  }
  __syncwarp();
  if (box * a.box_rows < C::kBlockK)
    ptx::tma_load_5d(ptx::shared_address(tile) +
                         (columns * C::kBlockK + box * a.box_rows) * C::CacheBox::kRowBytes,
                     &map, ptx::shared_address(&full), columns * C::CacheBox::kColumns, page_row,
                     head, page, 0);
  __syncwarp();
}

enum Loads { kKeysAndValues, kKeys, kValues };  // what a warp loads

template <class C, Loads kLoads = kKeysAndValues, class Shared>
__device__ __forceinline__ void load(Shared& shared, const Args& a, int begin, int end) {
  const int box = threadIdx.x % 32 / C::kBoxes;
  const int total = a.plan.first[a.plan.count];
  uint32_t turn = 0;
  for (Cursor cursor(a.plan, begin); cursor.at < end;) {
    const Slot& slot = cursor.slot;
    const Sequence sequence(a.p, slot.sequence);
    const int32_t* table = a.p.block_table + int64_t{slot.sequence} * a.p.columns;
    const int last = min(slot.blocks, cursor.block + end - cursor.at);
    const auto key_of = [&](int block) {
      return (slot.first_block + block) * C::kBlockK + box * a.box_rows;
    };
    // The page of this lane's keys; any, where the sequence has none.
    const auto page_of = [&](int block) {
      const int key = key_of(block);
      const int entry = key < sequence.seq_k ? __ldg(table + key / a.p.page) : 0;
      return min(max(entry, 0), a.p.pages - 1);
    };
    int page = page_of(cursor.block);
#pragma unroll 1
    for (int block = cursor.block; block < last; ++block, ++turn) {
      const int page_row = key_of(block) % a.p.page;
      const int next = block + 1 < last ? page_of(block + 1) : 0;
      const uint32_t stage = turn % C::kStages, parity = (turn / C::kStages & 1) ^ 1;
      if constexpr (kLoads != kValues)
        load_tile<C>(shared, shared.k[stage], shared.k_full[stage], shared.k_empty[stage], parity,
                     a.k, a, page, page_row, cursor.head);
      if constexpr (kLoads != kKeys)
        load_tile<C>(shared, shared.v[stage], shared.v_full[stage], shared.v_empty[stage], parity,
                     a.v, a, page, page_row, cursor.head);
      page = next;
    }
    cursor.advance(a.plan, last, a.p.heads_k, total);
  }
}

// Tile after tile: where it is, and Q into shared memory, with zeros past its head dim and in rows
// past the last that a warp computes beside others: no row sees another, but the offsets of all
// follow where those of one must, and so the last bits of results. What this warp waits for, the
// computing ones do not.
template <class C>
__device__ __forceinline__ void load_queries(Storage<C>& shared, const Args& a, int begin,
                                             int end) {
  constexpr int kChunks = C::kHeadDim / 8;  // of 16 bytes in a row
  const int lane = threadIdx.x % 32, total = a.plan.first[a.plan.count];
  uint32_t turn = 0;
  for (Cursor cursor(a.plan, begin); cursor.at < end; ++turn) {
    const Slot& slot = cursor.slot;
    const Sequence sequence(a.p, slot.sequence);
    const int last = min(slot.blocks, cursor.block + end - cursor.at);
    const int rows = min(kRows, sequence.seq_q * a.group - slot.first_row);
    const uint32_t stage = turn % C::kQStages;
    const auto place_of = [&](int i) {
      const int r = i / kChunks, chunk = i % kChunks;
      return ptx::shared_address(shared.q[stage]) + chunk / 8 * (kRows * 128) + r * 128 +
             ((chunk ^ r) & 7) * 16;
    };
    ptx::mbarrier_sleep(ptx::shared_address(&shared.q_empty[stage]), (turn / C::kQStages & 1) ^ 1);
#pragma unroll 4
    for (int i = lane; i < padded_rows(rows) * kChunks; i += 32) {
      const int pair = slot.first_row + i / kChunks, column = i % kChunks * 8;
      const int64_t token = sequence.first_q + pair / a.group;
      const int64_t head = cursor.head * a.group + pair % a.group;
      uint4 words = make_uint4(0, 0, 0, 0);
      if (i / kChunks < rows && column < a.p.head_dim)
        words = __ldg(reinterpret_cast<const uint4*>(
            static_cast<const uint16_t*>(a.p.q) + token * a.p.q_row + head * a.p.q_head + column));
      ptx::st_shared(place_of(i), words);
    }
    if (lane == 0)
      shared.tiles[stage] = Tile{slot,           cursor.head,      cursor.block,   last,
                                 cursor.begin(), sequence.first_q, sequence.seq_q, sequence.seq_k};
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(ptx::shared_address(&shared.q_full[stage]));
    cursor.advance(a.plan, last, a.p.heads_k, total);
  }
}

}  // namespace flashsci::sm90::paged
