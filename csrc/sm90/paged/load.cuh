// The loading warps of paged attention: blocks of K and V, gathered page by page.
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

enum Loads { kKeys, kValues };  // what a warp loads

template <class C, Loads kLoads>
__device__ __forceinline__ void load(Storage<C>& shared, const Args& a, Cursor cursor) {
  const Copy<C> copy(a);
  Pages<C> pages(a, shared.pages[kLoads], cursor);
  auto& blocks = kLoads == kKeys ? shared.k : shared.v;
  auto& full = kLoads == kKeys ? shared.k_full : shared.v_full;
  auto& empty = kLoads == kKeys ? shared.k_empty : shared.v_empty;
#pragma unroll 1
  for (uint32_t turn = 0; !cursor.done(); ++turn, cursor.next_block()) {
    const uint32_t stage = turn % C::kStages, parity = (turn / C::kStages & 1) ^ 1;
    load_block<C>(blocks[stage], full[stage], empty[stage], parity, kLoads == kKeys ? a.k : a.v,
                  copy, cursor, pages.take());
    pages.ask();
  }
}

}  // namespace flashsci::sm90::paged
