// Bias and mask of one tile of scores: their way to shared memory, and from there to the scores.
// Scores are interleaved (core/tile.cuh): the columns 2 t, 2 t + 1 of four n8 blocks are keys 8 t
// .. 8 t + 7, so that a lane reads neighbours, 16 bytes at a time.
#pragma once
#include <cmath>
#include <cstdint>

#include "../../core/smem_tile.cuh"
#include "../../include/flashsci.h"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/shared.cuh"

namespace flashsci::sm80::fwd {

// A bias tile in shared memory: [kBlockQ, kBlockK] elements as a Tile of 16-bit columns, two for
// each fp32 element.
template <class C, bool kFp32>
using BiasTile = Tile<C::kBlockK*(kFp32 ? 2 : 1)>;

// Elements one by one, for any strides; zeros outside.
template <class C, bool kFp32, class Element>
__device__ __forceinline__ void gather_bias(uint32_t tile,
                                            const Element* __restrict__ bias,  // [rows, keys]
                                            const FlashsciScoreStrides& strides, int rows,
                                            int keys) {
  // Neighbours in memory go to neighbouring threads.
  const bool by_rows = strides.row < strides.column;
#pragma unroll 4
  for (int i = threadIdx.x; i < C::kBlockQ * C::kBlockK; i += C::kThreads) {
    const int row = by_rows ? i % C::kBlockQ : i / C::kBlockK;
    const int key = by_rows ? i / C::kBlockQ : i % C::kBlockK;
    const Element x =
        row < rows && key < keys ? __ldg(bias + row * strides.row + key * strides.column) : 0;
    constexpr int kPerChunk = kChunkBytes / sizeof(Element);
    const uint32_t target = tile + BiasTile<C, kFp32>::offset(row, key / kPerChunk) +
                            key % kPerChunk * static_cast<int>(sizeof(Element));
    if constexpr (kFp32)
      ptx::st_shared(target, x);
    else
      ptx::st_shared_b16(target, x);
  }
}

// The same for neighbours of 16 bits without the alignment of a copy: two keys a thread, eight rows
// in flight at a time.
template <class C>
__device__ __forceinline__ void gather_bias_rows(uint32_t tile,
                                                 const uint16_t* __restrict__ bias,  // [rows, keys]
                                                 int64_t row_stride, int rows, int keys) {
  constexpr int kKeyPairs = C::kBlockK / 2, kRowStep = C::kThreads / kKeyPairs, kBatch = 8;
  static_assert(C::kBlockQ % (kRowStep * kBatch) == 0, "whole batches");
  const int pair = threadIdx.x % kKeyPairs, first = threadIdx.x / kKeyPairs;
  const bool low = 2 * pair < keys, high = 2 * pair + 1 < keys;
  const uint16_t* source = bias + first * row_stride + 2 * pair;
#pragma unroll 1
  for (int row = first; row < C::kBlockQ; row += kRowStep * kBatch) {
    uint32_t word[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool valid = row + i * kRowStep < rows;
      word[i] = valid && low ? __ldg(source) : 0;
      if (valid && high) word[i] |= uint32_t{__ldg(source + 1)} << 16;
      source += kRowStep * row_stride;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      ptx::st_shared(tile + BiasTile<C, false>::offset(row + i * kRowStep, pair / 4) + pair % 4 * 4,
                     word[i]);
  }
}

// Starts the copies of a bias tile of `rows` x `keys` (elements outside become 0, and are not
// read). copy_bytes: alignment of all rows, 16 only if they end there too; 0: columns are not
// neighbours.
template <class C>
__device__ __forceinline__ void load_bias(uint32_t tile,
                                          const unsigned char* __restrict__ bias,  // [rows, keys]
                                          const FlashsciScoreStrides& strides, bool fp32, int rows,
                                          int keys, int copy_bytes) {
  const auto* halves = reinterpret_cast<const uint16_t*>(bias);
  if (copy_bytes == 16) {
    if (fp32)
      load_tile<C::kBlockQ, C::kBlockK * 2, C::kThreads, true, true>(tile, halves, strides.row * 2,
                                                                     rows, keys * 2, 16);
    else
      load_tile<C::kBlockQ, C::kBlockK, C::kThreads, true, true>(tile, halves, strides.row, rows,
                                                                 keys, 16);
  } else if (fp32 && copy_bytes != 0) {
    load_tile<C::kBlockQ, C::kBlockK * 2, C::kThreads, false, true>(tile, halves, strides.row * 2,
                                                                    rows, keys * 2, copy_bytes);
  } else if (fp32) {
    gather_bias<C, true>(tile, reinterpret_cast<const uint32_t*>(bias), strides, rows, keys);
  } else if (copy_bytes > 2) {
    load_tile<C::kBlockQ, C::kBlockK, C::kThreads, false, true>(tile, halves, strides.row, rows,
                                                                keys, copy_bytes);
  } else if (copy_bytes != 0) {
    gather_bias_rows<C>(tile, halves, strides.row, rows, keys);
  } else {
    gather_bias<C, false>(tile, halves, strides, rows, keys);
  }
}

// The initial scores of a warp's rows: factor * bias. start: the place of this lane's first eight
// keys, from bias_start.
template <class C, bool kFp32>
__device__ __forceinline__ int bias_start(int warp) {
  return BiasTile<C, kFp32>::offset(warp * C::kRows + threadIdx.x / 4 % 8,
                                    threadIdx.x % 4 * (kFp32 ? 2 : 1));
}

template <class Op, class C, bool kFp32>
__device__ __forceinline__ void read_bias(float (&c)[C::kM][C::kN][4], uint32_t start,
                                          float factor) {
  static_assert(C::kBlockK == 32, "more keys: other chunks");
#pragma unroll
  for (int m = 0; m < C::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = start + (m * 16 + half * 8) * BiasTile<C, kFp32>::kRowBytes;
      float x[8];
      if constexpr (kFp32) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 word = ptx::ld_shared_v4(i == 0 ? row : row ^ kChunkBytes);
          x[4 * i] = __uint_as_float(word.x), x[4 * i + 1] = __uint_as_float(word.y);
          x[4 * i + 2] = __uint_as_float(word.z), x[4 * i + 3] = __uint_as_float(word.w);
        }
      } else {
        const uint4 word = ptx::ld_shared_v4(row);
        const uint32_t words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
        for (int i = 0; i < 8; ++i)
          x[i] = Op::to_float(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16)));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) c[m][i / 2][half * 2 + i % 2] = factor * x[i];
    }
  }
}

// Bytes of a mask in a lane's order: one for each of its keys, four in a word.
template <class C>
__device__ __forceinline__ bool hides(const uint32_t (&words)[C::kN / 2], int n, int e) {
  return (words[n / 2] & (0xffu << (n % 2 * 16 + e * 8))) == 0;
}

// Scores start from -inf where the mask of pairs hides. It is read in place. row, key: this lane's
// first. aligned: every four keys of every row are an aligned word.
template <class C>
__device__ __forceinline__ void hide_bias_mask(float (&c)[C::kM][C::kN][4],
                                               const uint8_t* __restrict__ mask,  // [seq_q, seq_k]
                                               const FlashsciScoreStrides& strides, bool aligned,
                                               int row, int key, int seq_q, int seq_k) {
  uint32_t words[C::kM][2][C::kN / 2];
  const auto each = [&](auto&& read) {
#pragma unroll
    for (int m = 0; m < C::kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint8_t* start =
            mask + min(row + m * 16 + half * 8, seq_q - 1) * strides.row + key * strides.column;
#pragma unroll
        for (int i = 0; i < C::kN / 2; ++i) words[m][half][i] = read(start, i / 2 * 32 + i % 2 * 4);
      }
  };
  if (aligned) {
    each([&](const uint8_t* start, int further) {
      return key + further < seq_k ? __ldg(reinterpret_cast<const uint32_t*>(start + further)) : 0;
    });
  } else {
    each([&](const uint8_t* start, int further) {
      uint32_t word = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (key + further + e < seq_k)
          word |= uint32_t{__ldg(start + (further + e) * strides.column)} << (8 * e);
      return word;
    });
  }
#pragma unroll
  for (int m = 0; m < C::kM; ++m)
#pragma unroll
    for (int n = 0; n < C::kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (hides<C>(words[m][e / 2], n, e % 2)) c[m][n][e] = -INFINITY;
}

// Copies tiles of [kRows, kCols] with one pointer a thread, which moves from tile to tile.
template <int kRows, int kCols, int kThreads, bool kInterleaved>
struct TileCopy {
  using T = Tile<kCols>;
  static constexpr int kThreadsPerRow = T::kChunks;
  static constexpr int kRowStep = kThreads / kThreadsPerRow;
  static constexpr int kPasses = kRows / kRowStep;
  static_assert(kRows % kRowStep == 0 && kRowStep % 8 == 0, "whole passes");
  const uint16_t* source;

  __device__ __forceinline__ static int row() { return threadIdx.x / kThreadsPerRow; }
  __device__ __forceinline__ static int chunk() { return threadIdx.x % kThreadsPerRow; }

  __device__ __forceinline__ void start(const uint16_t* tile, int64_t row_stride) {
    source = tile + row() * row_stride + chunk() * kChunkElements;
  }
  __device__ __forceinline__ void copy(uint32_t tile, int64_t row_stride, int64_t step,
                                       int rows_valid, int cols_valid) const {
    const bool column_valid = chunk() * kChunkElements < cols_valid;
    const uint16_t* from = source + step;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = this->row() + pass * kRowStep;
      poison_chunk(tile + T::offset(kInterleaved ? interleaved_row(row) : row, chunk()));
      ptx::cp_async_16(tile + T::offset(kInterleaved ? interleaved_row(row) : row, chunk()), from,
                       column_valid && row < rows_valid);
      from += kRowStep * row_stride;
    }
  }
};

// Copies the mask of a tile of keys, one byte each, to shared memory; keys past the last one are
// hidden.
template <int kKeys>
__device__ __forceinline__ void load_key_mask(uint32_t target,
                                              const uint8_t* __restrict__ mask,  // [keys]
                                              int64_t stride, bool aligned, int keys) {
  const int thread = threadIdx.x;
  if (aligned) {
    if (thread < kKeys / 4)
      ptx::cp_async_small<4>(target + thread * 4, mask + thread * 4,
                             min(max(keys - thread * 4, 0), 4));
  } else if (thread < kKeys) {
    ptx::st_shared_b8(target + thread, thread < keys ? mask[thread * stride] : 0);
  }
}

// The mask of a lane's keys; sets whether the tile shows and hides any key.
template <class C>
__device__ __forceinline__ void read_key_mask(uint32_t (&words)[C::kN / 2], uint32_t source,
                                              bool& any_shown, bool& any_hidden) {
  uint32_t shown = 0, hidden = 0;
#pragma unroll
  for (int i = 0; i < C::kN / 2; ++i) {
    words[i] = ptx::ld_shared(source + threadIdx.x % 4 * 8 + i / 2 * 32 + i % 2 * 4);
    shown |= words[i];
    hidden |= (words[i] - 0x01010101u) & ~words[i] & 0x80808080u;  // nonzero iff a byte is 0
  }
  any_shown = __any_sync(0xffffffffu, shown != 0);
  any_hidden = __any_sync(0xffffffffu, hidden != 0);
}

template <class C>
__device__ __forceinline__ void hide_keys(float (&s)[C::kM][C::kN][4],
                                          const uint32_t (&words)[C::kN / 2]) {
#pragma unroll
  for (int n = 0; n < C::kN; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (hides<C>(words, n, e))
#pragma unroll
        for (int m = 0; m < C::kM; ++m) s[m][n][e] = s[m][n][2 + e] = -INFINITY;
}

}  // namespace flashsci::sm80::fwd
