// The rows and pairs of a warp, as its lanes see them.
//
// Column c of a fragment of 16 scores stands for row row_of_column(c) of the stage's 16. So four
// lanes have neighbouring pairs, 128 bytes, and the lanes of the next row have the other halves of
// them (TMA exchanges pieces of 16 bytes in every other 128): no two of eight lanes have a bank
// conflict.
#pragma once
#include <cstdint>

#include "../load.cuh"
#include "config.cuh"

namespace flashsci::sm90::pair::half {

__device__ __forceinline__ int row_of_column(int c) { return (c & 8) | (c & 1) * 4 | (c & 6) / 2; }

// A warp's part of the work.
struct Warp {
  const int warp = threadIdx.x / 32;
  const int row = warp % 2 * kWarpRows;                           // its first row in the CTA
  const int quad = warp / 2 % 2 * kQuad;                          // its first head
  const int half = warp / 4;                                      // its half of a stage's rows
  const int group = threadIdx.x / 4 % 8, lane = threadIdx.x % 4;  // of score fragments

  // The offsets of its rows, in the CTA's own data and in a stage.
  __device__ __forceinline__ uint32_t own_rows(uint32_t rows) const {
    return rows + row * kPanelBytes;
  }
  __device__ __forceinline__ uint32_t block_rows(uint32_t rows) const {
    return rows + half * kWarpRows * kPanelBytes;
  }
  // The row, within the stage, of element (n, e) of a lane's score fragment.
  __device__ __forceinline__ int column(int n, int e) const {
    return half * kWarpRows + n * 8 + e % 2 * 4 + lane;
  }
};

// The mask of the keys of a lane's columns; 0 hides a key.
struct ShownColumns {
  uint8_t key[4];

  __device__ __forceinline__ ShownColumns(const ShownKeys& keys, int first_key, const Warp& w) {
#pragma unroll
    for (int i = 0; i < 4; ++i) key[i] = keys(first_key + w.column(i / 2, i % 2));
  }
  __device__ __forceinline__ bool operator()(int n, int e) const { return key[n * 2 + e % 2] != 0; }
};

// Calls each(n, e, place) for a lane's pairs, with the place of the warp's heads.
template <class Each>
__device__ __forceinline__ void for_cells(uint32_t cells, const Warp& w, Each&& each) {
  constexpr int kRowBytes = kBoxPairs * kCellBytes, kBox = kRows * kRowBytes;
  const uint32_t start = cells + w.half * (kWarpRows / kBoxPairs) * kBox +
                         (w.row + w.group) * kRowBytes + w.lane * kCellBytes +
                         (w.quad * 4 ^ w.group % 2 * 16);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int n = i / 4, e = i % 4;
    each(n, e, start + (n * 2 + e % 2) * kBox + e / 2 * 8 * kRowBytes);
  }
}

__device__ __forceinline__ void read_cells(float (&bias)[kQuad][2][4], uint32_t cells,
                                           const Warp& w) {
  for_cells(cells, w, [&](int n, int e, uint32_t place) {
    const uint4 x = ptx::ld_shared_v4(place);
    bias[0][n][e] = __uint_as_float(x.x), bias[1][n][e] = __uint_as_float(x.y);
    bias[2][n][e] = __uint_as_float(x.z), bias[3][n][e] = __uint_as_float(x.w);
  });
}

__device__ __forceinline__ void write_cells(const float (&x)[kQuad][2][4], uint32_t cells,
                                            const Warp& w) {
  for_cells(cells, w, [&](int n, int e, uint32_t place) {
    ptx::st_shared(place, make_uint4(__float_as_uint(x[0][n][e]), __float_as_uint(x[1][n][e]),
                                     __float_as_uint(x[2][n][e]), __float_as_uint(x[3][n][e])));
  });
}

}  // namespace flashsci::sm90::pair::half
