// The batch entry and head that a block works on, and the tile of its rows: batch, heads and the
// tiles of a head share grid.x.
#pragma once
#include <cstdint>

#include "../include/flashsci.h"

namespace flashsci {

struct HeadCoord {
  uint32_t batch_head, batch0, batch1, head;

  // block = ((b0 * batch1 + b1) * heads + head) * tiles + tile.
  __device__ __forceinline__ HeadCoord(uint32_t block, uint32_t tiles, int heads, int64_t batch1_) {
    batch_head = block / tiles;
    const uint32_t batch = batch_head / static_cast<uint32_t>(heads);
    head = batch_head - batch * static_cast<uint32_t>(heads);
    batch0 = batch / static_cast<uint32_t>(batch1_);
    batch1 = batch - batch0 * static_cast<uint32_t>(batch1_);
  }

  // Elements from the start of a tensor, in 64 bits. Strides: of rows or of pairs.
  template <class Strides>
  __device__ __forceinline__ int64_t offset(const Strides& strides, uint32_t of_head) const {
    return batch0 * strides.batch0 + batch1 * strides.batch1 + of_head * strides.head;
  }
};

// The same with the tile, for the backward.
struct TileCoord {
  uint32_t tile, batch, batch0, batch1, head;  // batch = b0 * batch1 + b1

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

}  // namespace flashsci
