// A [rows, kCols] tile of 16-bit elements in shared memory, row-major in 16-byte chunks, with the
// chunk index XORed by a function of the row so that the eight rows of an ldmatrix (or of a 4-byte
// fragment store) fall into eight different bank groups. Rows of 128-byte multiples: XOR by row %
// 8; rows of 64 mod 128 bytes: two rows share 128 bytes, XOR by (row / 2) % 4.
#pragma once
#include <cstdint>

#include "../ptx/cp_async.cuh"
#include "../ptx/shared.cuh"
#include "poison.cuh"

namespace flashsci {

inline constexpr int kChunkElements = 8;
inline constexpr int kChunkBytes = 16;

template <int kCols>
struct Tile {
  static_assert(kCols % 32 == 0, "the swizzles permute groups of 4 or 8 chunks");
  static constexpr int kChunks = kCols / kChunkElements;
  static constexpr int kGroup = kChunks % 8 == 0 ? 8 : 4;  // chunks permuted among themselves
  static constexpr int kRowBytes = kCols * 2;

  static __device__ __forceinline__ int swizzle(int row) {
    return kGroup == 8 ? row & 7 : (row >> 1) & 3;
  }

  // Byte offset of a chunk.
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ swizzle(row)) * kChunkBytes;
  }

  // Address of chunk (pair * 2 + odd) of a row, from start = base + offset(row, odd): the pair
  // index is a constant after unrolling, so only its low bits cost an XOR and the rest is an
  // immediate.
  static __device__ __forceinline__ uint32_t pair_address(uint32_t start, int pair) {
    constexpr int kPairs = kGroup / 2;
    return (start ^ ((pair % kPairs) * 2 * kChunkBytes)) + (pair / kPairs) * kGroup * kChunkBytes;
  }
};

// Hides from the compiler that a value is the same in every loop iteration. Derived values are then
// computed anew instead of being kept in registers, which are scarcer in the main loops than
// integer instructions.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The row of a key of K and V that gives a lane scores of neighbouring keys: the columns 2 t, 2 t +
// 1 of four n8 blocks are keys 8 t .. 8 t + 7 when key 8 t + 2 n + e is row 8 n + 2 t + e.
__device__ __forceinline__ int interleaved_row(int key) {
  return (key & ~30) | (key & 6) << 2 | (key & 24) >> 2;
}

// The key of score (n, e) of a lane, from the key of its first score.
template <bool kInterleaved>
__device__ __forceinline__ constexpr int key_of_score(int n, int e) {
  return kInterleaved ? n / 4 * 32 + n % 4 * 2 + e : n * 8 + e;
}

// One chunk whose first `columns` elements are in the tensor (<= 0: none), from a source aligned to
// copy_bytes only.
__device__ __forceinline__ void load_chunk(uint32_t target, const uint16_t* __restrict__ source,
                                           int columns, int copy_bytes) {
  if (copy_bytes >= 8) {
#pragma unroll
    for (int part = 0; part < 2; ++part)
      ptx::cp_async_small<8>(target + part * 8, source + part * 4,
                             min(max(columns - part * 4, 0), 4) * 2);
  } else if (copy_bytes == 4) {
#pragma unroll
    for (int part = 0; part < 4; ++part)
      ptx::cp_async_small<4>(target + part * 4, source + part * 2,
                             min(max(columns - part * 2, 0), 2) * 2);
  } else {
    uint32_t packed[4];
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const uint32_t low = 2 * part < columns ? source[2 * part] : uint16_t{0};
      const uint32_t high = 2 * part + 1 < columns ? source[2 * part + 1] : uint16_t{0};
      packed[part] = low | (high << 16);
    }
    ptx::st_shared(target, make_uint4(packed[0], packed[1], packed[2], packed[3]));
  }
}

// Copies rows [0, kRows) of a row-major global matrix into a Tile. Rows >= rows_valid and columns
// >= cols_valid become zeros and are not read. kVector: every row starts at a multiple of 16 bytes
// and cols_valid is a multiple of 8; otherwise every row starts at a multiple of copy_bytes (8, 4
// or 2). kFewRegisters: nothing is kept from one call to the next. kInterleaved: rows go to the
// places of interleaved_row.
template <int kRows, int kCols, int kThreads, bool kVector, bool kFewRegisters,
          bool kInterleaved = false>
__device__ __forceinline__ void load_tile(uint32_t tile,
                                          const uint16_t* __restrict__ global,  // [rows_valid, row]
                                          int64_t row_stride, int rows_valid, int cols_valid,
                                          int copy_bytes) {
  using T = Tile<kCols>;
  constexpr int kThreadsPerRow = T::kGroup;
  constexpr int kRowStep = kThreads / kThreadsPerRow;
  static_assert(kThreads % kThreadsPerRow == 0 && kRows % kRowStep == 0, "whole passes");
  static_assert(kRowStep % 8 == 0, "the swizzle of a thread's rows is the same in every pass");
  const int thread = kFewRegisters ? opaque(threadIdx.x) : static_cast<int>(threadIdx.x);
  const int first_row = thread / kThreadsPerRow;
  const int first_chunk = thread % kThreadsPerRow;
  const uint32_t shared = tile + T::offset(first_row, first_chunk);
  const uint16_t* row_start = global + first_row * row_stride + first_chunk * kChunkElements;

#pragma unroll
  for (int pass = 0; pass < kRows / kRowStep; ++pass) {
    const bool row_valid = first_row + pass * kRowStep < rows_valid;
    const uint32_t row_target =
        kInterleaved ? tile + T::offset(interleaved_row(first_row + pass * kRowStep), first_chunk)
                     : shared + pass * kRowStep * T::kRowBytes;
#pragma unroll
    for (int block = 0; block < T::kChunks / kThreadsPerRow; ++block) {
      const int column = (first_chunk + block * kThreadsPerRow) * kChunkElements;
      const uint32_t target = row_target + block * T::kGroup * kChunkBytes;
      const uint16_t* source = row_start + block * kThreadsPerRow * kChunkElements;
      poison_chunk(target);
      if constexpr (kVector) {
        ptx::cp_async_16(target, source, row_valid && column < cols_valid);
      } else {
        load_chunk(target, source, row_valid ? min(cols_valid - column, kChunkElements) : 0,
                   copy_bytes);
      }
    }
    row_start += kRowStep * row_stride;
  }
}

}  // namespace flashsci
