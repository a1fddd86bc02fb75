// The place of a block of the backward: its head, its batch entry, and the tiles of its rows.
#pragma once
#include <cstdint>

#include "../include/flashsci.h"
#include "smem_tile.cuh"

namespace flashsci {

// The head and batch entry that a block works on: `heads` heads of `tiles` blocks each.
struct TileCoord {
  uint32_t tile, batch, batch0, batch1, head;

  __device__ __forceinline__ TileCoord(uint32_t block, uint32_t tiles, int heads,
                                       const FlashsciBackwardParams& p) {
    const uint32_t batch_head = block / tiles;
    tile = block - batch_head * tiles;
    batch = batch_head / static_cast<uint32_t>(heads);
    head = batch_head - batch * static_cast<uint32_t>(heads);
    batch0 = batch / static_cast<uint32_t>(p.batch1);
    batch1 = batch - batch0 * static_cast<uint32_t>(p.batch1);
  }
  // Elements from the start of a tensor, in 64 bits.
  template <class Strides>
  __device__ __forceinline__ int64_t offset(const Strides& strides, uint32_t of_head) const {
    return batch0 * strides.batch0 + batch1 * strides.batch1 + of_head * strides.head;
  }
};

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
