// The tiles of rows that the backward copies, with 16-byte accesses or smaller ones.
#pragma once
#include <cstdint>

#include "../include/flashsci.h"
#include "smem_tile.cuh"

namespace flashsci {

// A tile of a tensor, its rows [row, row + rows_valid) of one head.
template <class C, int kRows>
__device__ __forceinline__ void load_tile_rows(uint32_t target, const void* data, int64_t offset,
                                               const FlashsciStrides& strides, int row,
                                               int rows_valid, int columns, int copy_bytes,
                                               bool vector) {
  const uint16_t* source = static_cast<const uint16_t*>(data) + offset + row * strides.row;
  if (vector)
    load_tile<kRows, C::kHeadDim, C::kThreads, true, true>(target, source, strides.row, rows_valid,
                                                           columns, 16);
  else
    load_tile<kRows, C::kHeadDim, C::kThreads, false, true>(target, source, strides.row, rows_valid,
                                                            columns, copy_bytes);
}

// Whether 16-byte accesses serve all rows.
inline bool takes_vectors(const void* data, const FlashsciStrides& s, int head_dim) {
  const uint64_t bits = static_cast<uint64_t>(s.batch0 | s.batch1 | s.head | s.row | head_dim);
  return bits % kChunkElements == 0 && reinterpret_cast<uintptr_t>(data) % kChunkBytes == 0;
}

}  // namespace flashsci
