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

// What a lane of a loading warp copies of a block: box_rows rows of a box's columns.
template <class C>
struct Copy {
  const Args& a;
  const int box, columns;  // which rows and columns
  __device__ __forceinline__ explicit Copy(const Args& a_)
      : a(a_), box(threadIdx.x % 32 / C::kBoxes), columns(threadIdx.x % 32 % C::kBoxes) {}
  __device__ __forceinline__ int key(const Cursor& cursor) const {
    return (cursor.slot.first_block + cursor.block) * C::kBlockK + box * a.box_rows;
  }
  // The others hold what they held: nothing counts beyond the last key.
  __device__ __forceinline__ bool has_keys(const Cursor& cursor) const {
    return box * a.box_rows < C::kBlockK && key(cursor) < cursor.slot.seq_k;
  }
};

// Pages of the blocks to come. Tables are in DRAM, as what they lead to: a warp that waited for both
// at each short sequence would leave the memory idle.
template <class C>
struct Pages {
  const Args& a;
  const Copy<C> copy;
  int32_t (&entries)[C::kAhead][C::kCopies];  // each lane reads what it has written
  Cursor cursor;                              // of the block that is looked up next
  uint32_t asked = 0, taken = 0;

  __device__ __forceinline__ Pages(const Args& a_, int32_t (&entries_)[C::kAhead][C::kCopies],
                                   const Cursor& begin)
      : a(a_), copy(a_), entries(entries_), cursor(begin) {
#pragma unroll 1
    for (int i = 0; i < C::kAhead; ++i) ask();
  }
  __device__ __forceinline__ uint32_t place(uint32_t turn) const {
    return ptx::shared_address(&entries[turn % C::kAhead][threadIdx.x % 32 % C::kCopies]);
  }
  __device__ __forceinline__ void ask() {
    if (!cursor.done()) {
      if (copy.has_keys(cursor))
        ptx::cp_async_small<4>(place(asked),
                               a.p.block_table + int64_t{cursor.slot.sequence} * a.p.columns +
                                   copy.key(cursor) / a.p.page,
                               4);
      cursor.next_block();
    }
    ptx::cp_async_commit();
    ++asked;
  }
  // That of the next block, for a lane that has keys; the cache's nearest where there is no such page.
  __device__ __forceinline__ int take() {
    ptx::cp_async_wait<C::kAhead - 1>();
    const int entry = static_cast<int>(ptx::ld_shared(place(taken++)));
    return min(max(entry, 0), a.p.pages - 1);
  }
};

// A block of K or V: box_rows divides kBlockK and kBoxes boxes have kHeadDim columns.
template <class C>
__device__ __forceinline__ void load_block(const unsigned char* block, uint64_t& full,
                                           uint64_t& empty, uint32_t parity, const CUtensorMap& map,
                                           const Copy<C>& copy, const Cursor& cursor, int page) {
  const int box_rows = copy.a.box_rows;
  const bool has_keys = copy.has_keys(cursor);
  const int copies = __popc(__ballot_sync(0xffffffffu, has_keys));
  ptx::mbarrier_sleep(ptx::shared_address(&empty), parity);
  if (threadIdx.x % 32 == 0) {
    poison_stage(ptx::shared_address(block), C::kKVBytes);
    ptx::mbarrier_arrive_expect(ptx::shared_address(&full),
                                copies * box_rows * C::CacheBox::kRowBytes);
  }
  __syncwarp();
  if (has_keys)
    ptx::tma_load_5d(ptx::shared_address(block) +
                         (copy.columns * C::kBlockK + copy.box * box_rows) * C::CacheBox::kRowBytes,
                     &map, ptx::shared_address(&full), copy.columns * C::CacheBox::kColumns,
                     copy.key(cursor) % copy.a.p.page, cursor.head, page, 0);
  __syncwarp();
}

enum Loads { kKeysAndValues, kKeys, kValues };  // what a warp loads

template <class C, Loads kLoads = kKeysAndValues, class Shared>
__device__ __forceinline__ void load(Shared& shared, const Args& a, Cursor cursor) {
  const Copy<C> copy(a);
  Pages<C> pages(a, shared.pages[kLoads == kValues ? 1 : 0], cursor);
#pragma unroll 1
  for (uint32_t turn = 0; !cursor.done(); ++turn, cursor.next_block()) {
    const uint32_t stage = turn % C::kStages, parity = (turn / C::kStages & 1) ^ 1;
    const int page = pages.take();
    if constexpr (kLoads != kValues)
      load_block<C>(shared.k[stage], shared.k_full[stage], shared.k_empty[stage], parity, a.k, copy,
                    cursor, page);
    if constexpr (kLoads != kKeys)
      load_block<C>(shared.v[stage], shared.v_full[stage], shared.v_empty[stage], parity, a.v, copy,
                    cursor, page);
    pages.ask();
  }
}

// Tile after tile: where it is, and Q into shared memory, with zeros past its head dim and in rows
// past the last that a warp computes beside others: no row sees another, but the offsets of all
// follow where those of one must, and so the last bits of results. What this warp waits for, the
// computing ones do not; and the first rows, all that a decoding sequence has, are on their way
// before there is a place for them.
template <class C>
__device__ __forceinline__ void load_queries(Storage<C>& shared, const Args& a, Cursor cursor) {
  constexpr int kChunks = C::kHeadDim / 8;              // of 16 bytes in a row
  constexpr int kTogether = C::kHeadDim == 64 ? 4 : 8;  // of a lane
  constexpr int kStep = kTogether * 32 / kChunks;       // rows
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (uint32_t turn = 0; !cursor.done(); ++turn, cursor.next_tile()) {
    const Slot& slot = cursor.slot;
    const int rows = min(kRows, slot.seq_q * a.group - slot.first_row);
    const uint32_t stage = turn % C::kQStages;
#pragma unroll 1
    for (int first = 0; first < padded_rows(rows); first += kStep) {
      uint4 words[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int r = first + (i * 32 + lane) / kChunks, column = lane % kChunks * 8;
        const int pair = slot.first_row + r;
        const int64_t token = slot.first_q + pair / a.group;
        const int64_t head = cursor.head * a.group + pair % a.group;
        words[i] = make_uint4(0, 0, 0, 0);
        if (r < rows && column < a.p.head_dim)
          words[i] =
              __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.p.q) +
                                                   token * a.p.q_row + head * a.p.q_head + column));
      }
      if (first == 0)
        ptx::mbarrier_sleep(ptx::shared_address(&shared.q_empty[stage]),
                            (turn / C::kQStages & 1) ^ 1);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int r = first + (i * 32 + lane) / kChunks, chunk = lane % kChunks;
        ptx::st_shared(ptx::shared_address(shared.q[stage]) + chunk / 8 * (kRows * 128) + r * 128 +
                           ((chunk ^ r) & 7) * 16,
                       words[i]);
      }
    }
    if (lane == 0)
      shared.tiles[stage] = Tile{slot, cursor.head, cursor.block, cursor.last, cursor.begin()};
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(ptx::shared_address(&shared.q_full[stage]));
  }
}

}  // namespace flashsci::sm90::paged
