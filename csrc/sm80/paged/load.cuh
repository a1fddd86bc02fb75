// The loading warps of paged attention without TMA: 16 bytes of a row for each lane at a time.
#pragma once
#include <cstdint>

#include "../../core/paged/pages.cuh"
#include "../../core/poison.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "config.cuh"

namespace flashsci::sm80::paged {

// A lane looks up the page of 16 rows of a block.
template <class C>
struct Lookup {
  const int rows = threadIdx.x % 32 * kSmallPage;  // first row of the page
  static __device__ __forceinline__ int block_key(const Cursor& cursor) {
    return (cursor.slot.first_block + cursor.block) * C::kBlockK;
  }
  __device__ __forceinline__ int key(const Cursor& cursor) const {
    return block_key(cursor) + rows;
  }
  __device__ __forceinline__ bool has_keys(const Cursor& cursor) const {
    return rows < C::kBlockK && key(cursor) < cursor.slot.seq_k;
  }
};

// The loads of K, or of V.
template <class C>
struct Cache {
  static constexpr int kLanes = C::kHeadDim * C::kBytes / 16;  // per row
  static constexpr int kRowsTogether = 32 / kLanes;            // per warp
  static constexpr int kSteps = kSmallPage / kRowsTogether;    // per 16 rows
  static constexpr int kBoxPieces = C::kColumns * C::kBytes / 16;

  const unsigned char* values;
  int64_t page, row, head;     // strides, in bytes
  const int first_row, piece;  // this lane's first copy: row of 16, and piece of the row
  int piece_bytes;             // bytes of those 16 that the head dim has

  __device__ __forceinline__ Cache(const void* values_, int64_t page_, int64_t row_, int64_t head_,
                                   int head_dim)
      : values(static_cast<const unsigned char*>(values_)),
        page(page_ * C::kBytes),
        row(row_ * C::kBytes),
        head(head_ * C::kBytes),
        first_row(threadIdx.x % 32 / kLanes),
        piece(threadIdx.x % kLanes),
        piece_bytes(min(max(head_dim * C::kBytes - piece * 16, 0), 16)) {}

  // Zeros past the end of the row. A row of an 8-bit cache may end in the middle of 16 bytes.
  __device__ __forceinline__ void copy(uint32_t place, const unsigned char* source) const {
    if (C::kBytes == 1 && piece_bytes == 8) {
      ptx::cp_async_small<8>(place, source, 8);
      ptx::cp_async_small<8>(place + 8, source, 0);
    } else {
      ptx::cp_async_16(place, source, piece_bytes != 0);
    }
  }

  // Copies the rows at `source`, from `first` on of a block, up to the last key.
  __device__ __forceinline__ void copy_rows(uint32_t block, int first, const unsigned char* source,
                                            int keys) const {
    source += first_row * row + piece * 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step, source += kRowsTogether * row) {
      const int at = step * kRowsTogether + first_row;
      if (at < keys)
        copy(block + cache_place<C>(piece / kBoxPieces, first + at, piece % kBoxPieces), source);
    }
  }
};

// Beyond the last key stages keep old contents: nothing counts there.
template <class C, Role kRole>
__device__ __forceinline__ void load(Storage<C>& shared, const Args& a, Cursor cursor) {
  constexpr bool kKeys = kRole == kLoadsKeys;
  const FlashsciPagedParams& p = a.p;
  const Cache<C> cache = kKeys ? Cache<C>(p.k_cache, p.k_page, p.k_row, p.k_head, p.head_dim)
                               : Cache<C>(p.v_cache, p.v_page, p.v_row, p.v_head, p.head_dim_v);
  const Lookup<C> lookup;
  Pages<C, Lookup<C>> pages(a, lookup, shared.pages[!kKeys], cursor);
  auto& full = kKeys ? shared.k_full : shared.v_full;
  auto& empty = kKeys ? shared.k_empty : shared.v_empty;
#pragma unroll 1
  for (Turn turn; !cursor.done(); turn.next(a.stages), cursor.next_block()) {
    auto& stage = shared.blocks[turn.stage];
    const uint32_t block = ptx::shared_address(kKeys ? stage.k : stage.v);
    const int keys = cursor.slot.seq_k - Lookup<C>::block_key(cursor);  // from the block's first on
    const int64_t found = pages.take() * cache.page + lookup.key(cursor) % p.page * cache.row +
                          cursor.head * cache.head;
    C::Isa::sleep(empty[turn.stage], turn.parity ^ 1);
    poison_warp(block, kKVBytes);
#pragma unroll
    for (int i = 0; i < C::kCopies; ++i)
      cache.copy_rows(block, i * kSmallPage, cache.values + __shfl_sync(0xffffffffu, found, i),
                      keys - i * kSmallPage);
    ptx::cp_async_arrive(ptx::shared_address(&full[turn.stage]));
    pages.ask();
  }
}

}  // namespace flashsci::sm80::paged
