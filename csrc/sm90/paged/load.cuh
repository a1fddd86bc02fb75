// The loading warps of paged attention: blocks of K and V, gathered page by page.
#pragma once
#include <cstdint>

#include "../../core/paged/pages.cuh"
#include "../../core/poison.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "config.cuh"
#include "lockstep.cuh"

namespace flashsci::sm90::paged {

// A lane's copy of a block: box_rows rows of a box's columns, or of all columns if joined.
template <class C>
struct Copy {
  const MappedArgs& a;
  const int box, columns;  // its rows and columns
  __device__ __forceinline__ explicit Copy(const MappedArgs& a_)
      : a(a_), box(threadIdx.x % 32 / C::kRowCopies), columns(threadIdx.x % 32 % C::kRowCopies) {}
  __device__ __forceinline__ int key(const Cursor& cursor) const {
    return (cursor.slot.first_block + cursor.block) * C::kBlockK + box * a.box_rows;
  }
  // The other rows keep old contents: nothing counts beyond the last key.
  __device__ __forceinline__ bool has_keys(const Cursor& cursor) const {
    return box * a.box_rows < C::kBlockK && key(cursor) < cursor.slot.seq_k;
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
  C::Isa::sleep(empty, parity);
  if (threadIdx.x % 32 == 0) {
    poison_stage(ptx::shared_address(block), C::kKVBytes);
    ptx::mbarrier_arrive_expect(ptx::shared_address(&full), copies * box_rows * C::kPitch);
  }
  __syncwarp();
  const int row = copy.key(cursor) % copy.a.p.page;
  if constexpr (C::kJoined) {
    if (has_keys)
      ptx::tma_load_5d(ptx::shared_address(block) + copy.box * box_rows * C::kPitch, &map,
                       ptx::shared_address(&full), 0, 0, row, cursor.head, page);
  } else if (has_keys) {
    ptx::tma_load_5d(
        ptx::shared_address(block) + (copy.columns * C::kBlockK + copy.box * box_rows) * C::kPitch,
        &map, ptx::shared_address(&full), copy.columns * C::CacheBox::kColumns, row, cursor.head,
        page, 0);
  }
  __syncwarp();
}

template <class C, Role kRole>
__device__ __forceinline__ void load(Storage<C>& shared, const MappedArgs& a, const Runs& runs,
                                     Cursor cursor) {
  constexpr bool kKeys = kRole == kLoadsKeys;
  Lockstep lockstep(runs);
  const Copy<C> copy(a);
  Pages<C, Copy<C>> pages(a, copy, shared.pages[!kKeys], cursor);
  auto& full = kKeys ? shared.k_full : shared.v_full;
  auto& empty = kKeys ? shared.k_empty : shared.v_empty;
#pragma unroll 1
  for (Turn turn; !cursor.done(); turn.next(a.stages), cursor.next_block()) {
    if constexpr (kKeys) lockstep.keep(pages.taken);  // values follow keys
    auto& block = shared.blocks[turn.stage];
    load_block<C>(kKeys ? block.k : block.v, full[turn.stage], empty[turn.stage], turn.parity ^ 1,
                  kKeys ? a.k : a.v, copy, cursor, pages.take());
    pages.ask();
  }
  if constexpr (kKeys) lockstep.end(pages.taken);
}

}  // namespace flashsci::sm90::paged
