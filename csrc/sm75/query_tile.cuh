// The work of a CTA that owns query rows: its rows, and the keys they see.
#pragma once
#include <cstdint>

#include "../core/mask.cuh"
#include "../core/varlen.cuh"

namespace flashsci::sm75 {

// The tile of a slot, one of `tiles` of a head; without packed sequences, the longest comes first.
template <class C>
struct QueryTile : TileOfSequence {
  template <class Params>
  __device__ __forceinline__ QueryTile(uint32_t slot, uint32_t tiles, const Params& p)
      : TileOfSequence(
            p.cu_seqlens_q != nullptr
                ? find_tile<C::kBlockQ>(slot, p.cu_seqlens_q, p.cu_seqlens_k, p.num_seqs, p.seq_q,
                                        p.seq_k)
                : TileOfSequence{static_cast<int>(p.window_right >= 0 ? tiles - 1 - slot : slot), 0,
                                 p.seq_q, 0, p.seq_k}) {}
};

// Key tiles [first_tile, end_tile) that any row of the CTA sees, and the keys of a warp: some of
// its rows see keys [seen_begin, seen_end), all of them [full_begin, full_end).
template <class C>
struct VisibleKeys {
  int first_tile, end_tile, seen_begin, seen_end, full_begin, full_end;

  __device__ __forceinline__ VisibleKeys(const Window& window, int tile_row, int warp_row,
                                         int seq_q) {
    const int last_row = min(tile_row + C::kBlockQ, seq_q) - 1;
    const int keys_begin = window.begin(tile_row), keys_end = window.end(last_row);
    first_tile = keys_begin / C::kBlockK;
    end_tile = keys_begin < keys_end ? (keys_end + C::kBlockK - 1) / C::kBlockK : first_tile;
    const int warp_last_row = min(warp_row + C::kRows, seq_q) - 1;
    seen_begin = window.begin(warp_row);
    seen_end = warp_row < seq_q ? window.end(warp_last_row) : 0;
    full_begin = window.begin(warp_last_row);
    full_end = window.end(warp_row);
  }
  // Whether some rows of the warp see some keys of the tile; whether not all rows see all of them.
  __device__ __forceinline__ bool seen(int tile) const {
    const int first_key = tile * C::kBlockK;
    return first_key < seen_end && first_key + C::kBlockK > seen_begin;
  }
  __device__ __forceinline__ bool cut(int tile) const {
    const int first_key = tile * C::kBlockK;
    return first_key < full_begin || first_key + C::kBlockK > full_end;
  }
};

}  // namespace flashsci::sm75
