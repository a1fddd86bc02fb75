// The tiles of columns that a CTA of the fp32 kernels goes through for its rows. Rows are queries
// and columns are keys, or the other way round.
#pragma once
#include "../../core/mask.cuh"

namespace flashsci::sm80 {

// Tiles of kBlockColumns columns that any row of a CTA sees, and columns that the rows of one of
// its warps see: some of them [seen_begin, seen_end), all of them [full_begin, full_end).
template <int kBlockColumns>
struct VisibleTiles {
  int first_tile, end_tile;
  int seen_begin, seen_end, full_begin, full_end;

  // The CTA has the rows from tile_row on, the warp those from warp_row on.
  __device__ __forceinline__ VisibleTiles(const Window& window, int rows, int tile_row,
                                          int tile_rows, int warp_row, int warp_rows) {
    const int last_row = min(tile_row + tile_rows, rows) - 1;
    const int begin = window.begin(tile_row), end = window.end(last_row);
    first_tile = begin / kBlockColumns;
    end_tile = begin < end ? (end + kBlockColumns - 1) / kBlockColumns : first_tile;
    const int warp_last_row = min(warp_row + warp_rows, rows) - 1;
    seen_begin = window.begin(warp_row);
    seen_end = warp_row < rows ? window.end(warp_last_row) : 0;
    full_begin = window.begin(warp_last_row), full_end = window.end(warp_row);
  }
};

}  // namespace flashsci::sm80
