// The copies of a CTA, and the pairs as a lane sees them.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "config.cuh"

namespace flashsci::sm90::pair {

// The heads and batch entry of a cluster, and the tile of their rows.
struct Place {
  uint32_t tile, batch, batch0, batch1, head;  // head: the first of them

  __device__ __forceinline__ Place(uint32_t cluster, uint32_t tiles, int heads, int64_t batches1) {
    const uint32_t groups = heads / kHeads, group = cluster / tiles;
    tile = cluster - group * tiles;
    batch = group / groups;
    head = (group - batch * groups) * kHeads;
    batch0 = batch / static_cast<uint32_t>(batches1);
    batch1 = batch - batch0 * static_cast<uint32_t>(batches1);
  }
  template <class Strides>
  __device__ __forceinline__ float* rows(void* data, const Strides& strides) const {
    return static_cast<float*>(data) + batch0 * strides.batch0 + batch1 * strides.batch1 +
           head * strides.head;
  }
  // Copies a box of rows of all heads, in one thread; zeros past the last row and column.
  __device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap& map, int row,
                                           uint32_t barrier) const {
    ptx::tma_load_5d(target, &map, barrier, 0, row, head, batch1, batch0);
  }
};

// A warp's part of the work.
struct Warp {
  const int warp = threadIdx.x / 32;
  const int row = warp % 2 * kWarpRows;                           // its first row in the CTA
  const int quad = warp / 2 % 2 * kQuad;                          // its first head
  const int half = warp / 4;                                      // its half of a stage's rows
  const int group = threadIdx.x / 4 % 8, lane = threadIdx.x % 4;  // of score fragments

  // The offsets of its rows of a head, in the CTA's own data and in a stage.
  template <int kDim>
  __device__ __forceinline__ uint32_t own_rows(uint32_t box, int head) const {
    return box + ((quad + head) * kRows + row) * kDim * 4;
  }
  template <int kDim>
  __device__ __forceinline__ uint32_t block_rows(uint32_t box, int head) const {
    return box + ((quad + head) * kRows + half * kWarpRows) * kDim * 4;
  }
  // For element (n, e) of a lane's score fragment: its row within the CTA's rows, and the stage's.
  __device__ __forceinline__ int own_row(int e) const { return row + group + e / 2 * 8; }
  __device__ __forceinline__ int column(int n, int e) const {
    return half * kWarpRows + n * 8 + lane * 2 + e % 2;
  }
};

// Loads part of a stage: the rows of two tensors from `row` on, and their pairs with the CTA's rows
// from `own` on. One thread; `bytes`: the rest of the stage.
template <int kDim>
__device__ __forceinline__ void copy_stage(uint32_t stage, uint32_t barrier, const Place& place,
                                           const CUtensorMap& first, const CUtensorMap& second,
                                           const CUtensorMap& bias, int row, int own, int bytes) {
  constexpr int kBytes = offsetof(Stage<kDim>, statistics);
  static_assert(kBytes == kRows * (2 * kHeads * kDim * 4 + kRows * kCellBytes),
                "boxes fill their stage");
  ptx::mbarrier_arrive_expect(barrier, kBytes + bytes);
  place.copy_box(stage, first, row, barrier);
  place.copy_box(stage + static_cast<uint32_t>(offsetof(Stage<kDim>, second)), second, row,
                 barrier);
  ptx::tma_load_5d(stage + static_cast<uint32_t>(offsetof(Stage<kDim>, cells)), &bias, barrier,
                   place.head, row, own, place.batch1, place.batch0);
}

// Calls each(n, e, place) for a lane's pairs, with the place of the warp's heads. The halves of a
// cell are exchanged, as TMA stores them: for all of a lane's pairs or none.
template <class Each>
__device__ __forceinline__ void for_cells(uint32_t cells, const Warp& w, Each&& each) {
  const uint32_t start =
      cells + (w.own_row(0) * kRows + w.column(0, 0)) * kCellBytes + (w.quad * 4 ^ w.lane / 2 * 16);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int n = i / 4, e = i % 4;
    each(n, e, start + (e / 2 * 8 * kRows + n * 8 + e % 2) * kCellBytes);
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

// Whether the keys of a lane's columns are visible: nonzero. They are loaded a block ahead.
struct ShownColumns {
  uint8_t key[4];
  __device__ __forceinline__ bool operator()(int n, int e) const { return key[n * 2 + e % 2] != 0; }
};

// The mask of the keys of a batch.
struct ShownKeys {
  const uint8_t* mask;  // or null
  int64_t stride;
  int seq_k;

  __device__ __forceinline__ ShownKeys(const FlashsciBiasMask& p, const Place& place, int seq_k_)
      : mask(p.mask), stride(p.mask_strides.column), seq_k(seq_k_) {
    if (mask != nullptr)
      mask += place.batch0 * p.mask_strides.batch0 + place.batch1 * p.mask_strides.batch1;
  }
  __device__ __forceinline__ uint8_t operator()(int key) const {
    return key >= seq_k ? 0 : mask == nullptr ? 1 : __ldg(mask + key * stride);
  }
  __device__ __forceinline__ ShownColumns columns(int first_key, const Warp& w) const {
    ShownColumns shown;
#pragma unroll
    for (int i = 0; i < 4; ++i) shown.key[i] = (*this)(first_key + w.column(i / 2, i % 2));
    return shown;
  }
};

}  // namespace flashsci::sm90::pair
