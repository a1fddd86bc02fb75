// A tile on its way from global memory to shared memory through registers, for Turing, which has no
// cp.async: fetch() starts the loads, store() waits for them and writes the Tile. The tile occupies
// registers in between, and the arithmetic of another tile hides the latency.
#pragma once
#include <cstdint>

#include "../ptx/shared.cuh"
#include "smem_tile.cuh"

namespace flashsci {

// One chunk whose first `columns` elements are in the tensor (<= 0: none); the rest are zeros and
// are not read. The source is aligned to 2 bytes, or to 4 and more by copy_bytes.
__device__ __forceinline__ uint4 fetch_chunk(const uint16_t* __restrict__ source, int columns,
                                             int copy_bytes) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool low = 2 * i < columns, high = 2 * i + 1 < columns;
    if (high && copy_bytes >= 4) {
      word[i] = __ldg(reinterpret_cast<const uint32_t*>(source) + i);
    } else {
      word[i] = low ? __ldg(source + 2 * i) : uint16_t{0};
      if (high) word[i] |= static_cast<uint32_t>(__ldg(source + 2 * i + 1)) << 16;
    }
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// Rows [0, kRows) of a row-major global matrix.
template <int kRows, int kCols, int kThreads>
struct TileRegisters {
  using T = Tile<kCols>;
  // All chunks of a row if their number is a power of two, and enough rows for all threads.
  static constexpr bool kWholeRows =
      (T::kChunks & (T::kChunks - 1)) == 0 && kThreads / T::kChunks % 8 == 0;
  static constexpr int kThreadsPerRow = kWholeRows ? T::kChunks : T::kGroup;
  static constexpr int kRowStep = kThreads / kThreadsPerRow;
  static constexpr int kPasses = kRows / kRowStep, kBlocks = T::kChunks / kThreadsPerRow;
  static_assert(kThreads % kThreadsPerRow == 0 && kRows % kRowStep == 0, "whole passes");
  static_assert(kRowStep % 8 == 0, "the swizzle of a thread's rows is the same in every pass");

  uint4 chunk[kPasses][kBlocks];  // [rows first_row + pass * kRowStep, chunks first_chunk + ...]

  // Rows >= rows_valid and columns >= cols_valid become zeros and are not read. kVector: every row
  // starts at a multiple of 16 bytes and cols_valid is a multiple of 8; otherwise every row starts
  // at a multiple of copy_bytes (8, 4 or 2).
  template <bool kVector>
  __device__ __forceinline__ void fetch(const uint16_t* __restrict__ global,  // [rows_valid, row]
                                        int64_t row_stride, int rows_valid, int cols_valid,
                                        int copy_bytes) {
    const int thread = opaque(threadIdx.x);
    const int first_row = thread / kThreadsPerRow;
    const int first_column = thread % kThreadsPerRow * kChunkElements;
    const uint16_t* row = global + first_row * row_stride + first_column;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool row_valid = first_row + pass * kRowStep < rows_valid;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        constexpr int kStep = kThreadsPerRow * kChunkElements;
        const int columns = cols_valid - first_column - block * kStep;
        if constexpr (kVector) {
          chunk[pass][block] = row_valid && columns > 0
                                   ? __ldg(reinterpret_cast<const uint4*>(row + block * kStep))
                                   : make_uint4(0, 0, 0, 0);
        } else {
          chunk[pass][block] =
              fetch_chunk(row + block * kStep, row_valid ? columns : 0, copy_bytes);
        }
      }
      row += kRowStep * row_stride;
    }
  }

  __device__ __forceinline__ void store(uint32_t tile) const {
    const int thread = opaque(threadIdx.x);
    const uint32_t start = tile + T::offset(thread / kThreadsPerRow, thread % kThreadsPerRow);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        ptx::st_shared(
            start + pass * kRowStep * T::kRowBytes + block * kThreadsPerRow * kChunkBytes,
            chunk[pass][block]);
  }
};

}  // namespace flashsci
