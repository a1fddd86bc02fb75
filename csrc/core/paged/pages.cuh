// The pages of the next blocks.
#pragma once
#include <cstdint>

#include "../../ptx/cp_async.cuh"
#include "../../ptx/shared.cuh"
#include "config.cuh"

namespace flashsci::paged {

// Tables are in DRAM, like the pages: a warp that waited for both at each short sequence would
// leave the memory idle. Lanes says which key of a block a lane looks up, `key`, and whether it has
// one, `has_keys`. Other copies of the warp by cp.async, issued at each turn before `ask`, are
// complete kAhead turns later.
template <class C, class Lanes>
struct Pages {
  const Args& a;
  const Lanes lanes;
  int32_t (&entries)[C::kAhead][C::kCopies];  // each lane reads its own writes
  Cursor cursor;                              // the next block to look up
  uint32_t asked = 0, taken = 0;

  __device__ __forceinline__ Pages(const Args& a_, const Lanes& lanes_,
                                   int32_t (&entries_)[C::kAhead][C::kCopies], const Cursor& begin)
      : a(a_), lanes(lanes_), entries(entries_), cursor(begin) {
#pragma unroll 1
    for (int i = 0; i < C::kAhead; ++i) ask();
  }
  __device__ __forceinline__ uint32_t place(uint32_t turn) const {
    return ptx::shared_address(&entries[turn % C::kAhead][threadIdx.x % 32 % C::kCopies]);
  }
  __device__ __forceinline__ void ask() {
    if (!cursor.done()) {
      if (lanes.has_keys(cursor))
        ptx::cp_async_small<4>(place(asked),
                               a.p.block_table + int64_t{cursor.slot.sequence} * a.p.columns +
                                   lanes.key(cursor) / a.p.page,
                               4);
      cursor.next_block();
    }
    ptx::cp_async_commit();
    ++asked;
  }
  // The page of the next block, for a lane that has keys; an entry that is no page becomes the
  // nearest page.
  __device__ __forceinline__ int take() {
    ptx::cp_async_wait<C::kAhead - 1>();
    const int entry = static_cast<int>(ptx::ld_shared(place(taken++)));
    return min(max(entry, 0), a.p.pages - 1);
  }
};

}  // namespace flashsci::paged
