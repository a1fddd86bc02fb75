// A bias whose rows begin anywhere, such as rows of 1,023 keys in 16 bits, as TMA can read it.
//
// TMA wants bases and strides that are multiples of 16 bytes, but a box may begin at any element of
// a row. Eight rows are such a stride. So a row of the map is a group of eight rows of the tensor,
// and a box holds one row of each of some groups: rows t, t + 8, t + 16, ...
//
// The tensor is a list of rows that are `pitch` elements apart; heads and batch entries begin some
// rows further on. Groups end with the list. The first one begins before it, at a multiple of 16
// bytes, but no box reads what is before the list or behind it.
//
// Shared  Row r of a tile of n rows, 128 bytes each, is in place r % 8 * (n / 8 + 1) + r / 8. The
//         places of eight neighbouring rows have different swizzles, so that their reads do not
//         collide.
// Keys    Beyond the last key of a row there are numbers of the next one, not zeros.
//
// A row that all queries share is a box of one row, which needs no stride: the list is one of
// elements.
#pragma once
#include <cstdint>

#include "../ptx/tma.cuh"
#include "tma_map.h"

namespace flashsci::sm90 {

// Rows of 128 bytes that a tile of n rows takes.
constexpr __host__ __device__ int grouped_places(int n) { return n + 8; }

struct RowGroups {
  int pitch;                 // elements from one row to the next; 0: the map is one of rows
  int first;                 // elements before the first row in its group
  int offset;                // rows of the first group that are before the list
  int head, batch1, batch0;  // rows from one to the next

  // The first row of a head in the list.
  template <class Coord>
  __device__ __forceinline__ int row_of(const Coord& at, int head_index) const {
    return at.batch0 * batch0 + at.batch1 * batch1 + head_index * head;
  }
};

// dims: rows, heads and batches of the tensor. box_rows: 1 if all rows are the same. Not supported:
// heads or batches that are not whole rows apart.
inline cudaError_t encode_row_groups(CUtensorMap* map, RowGroups& groups, const void* base,
                                     const MapElement& element, int columns, const MapDims& dims,
                                     int box_columns, int box_rows) {
  const bool one = box_rows == 1;
  const int64_t pitch = one ? 1 : dims.stride[0];
  if (!one && (box_columns * element.bytes != 128 || dims.size[0] < 2 || pitch < columns ||
               pitch >= 1 << 27))
    return cudaErrorNotSupported;
  int64_t last = one ? columns - 1 : dims.size[0] - 1;  // of the list
  int apart[3];
  for (int i = 1; i < 4; ++i) {
    const int64_t stride = dims.size[i] > 1 ? dims.stride[i] : 0;
    if (stride < 0 || stride % pitch != 0 || stride / pitch >= 1 << 30)
      return cudaErrorNotSupported;
    apart[i - 1] = static_cast<int>(stride / pitch);
    last += (dims.size[i] - 1) * apart[i - 1];
  }
  if (last >= 1 << 30) return cudaErrorNotSupported;
  const int offset = one ? 0 : static_cast<int>(7 - last % 8);
  const auto start = reinterpret_cast<uintptr_t>(base) - offset * pitch * element.bytes;
  const int first = static_cast<int>(start % 16) / element.bytes;
  groups = {static_cast<int>(pitch), first, offset, apart[0], apart[1], apart[2]};
  const MapDims listed = {{one ? 1 : (last + 1 + offset) / 8, 1, 1, 1}, {8 * pitch, 0, 0, 0}};
  return encode_map(map, reinterpret_cast<const void*>(start / 16 * 16), element,
                    static_cast<int>(first + (one ? last + 1 : 7 * pitch + columns)), listed,
                    box_columns, one ? 1 : box_rows / 8);
}

// Loads keys of a row that all queries share.
__device__ __forceinline__ void load_shared_row(uint32_t target, const CUtensorMap* map,
                                                uint32_t barrier, const RowGroups& groups, int key,
                                                int first) {
  ptx::tma_load_5d(target, map, barrier, groups.first + first + key, 0, 0, 0, 0);
}

// Loads kRows rows of the list, from `row` on, as eight boxes.
template <int kRows>
__device__ __forceinline__ void load_row_groups(uint32_t target, const CUtensorMap* map,
                                                uint32_t barrier, const RowGroups& groups, int key,
                                                int row) {
  int group = (row + groups.offset) / 8, place = (row + groups.offset) % 8;
#pragma unroll 1
  for (int t = 0; t < 8; ++t) {
    ptx::tma_load_5d(target + t * (grouped_places(kRows) / 8 * 128), map, barrier,
                     groups.first + place * groups.pitch + key, group, 0, 0, 0);
    if (++place == 8) place = 0, ++group;
  }
}

}  // namespace flashsci::sm90
