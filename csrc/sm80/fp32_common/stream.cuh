// Two fp32 tensors that a CTA goes through tile by tile (K and V, or Q and dO): copied raw, then
// converted to halves with one power of two for each tensor of a tile.
//
// Rows of a tile may differ so much in size that one scale does not fit them all (fp16 has 5
// exponent bits; a masked row may hold anything). The tile is then processed in several passes,
// each over rows of similar size, largest first; the other rows are zeros in that pass, and hidden.
// Rows of zeros (padding) fit any scale, and are marked: their multipliers must not decide the
// power of two by which P or dS become halves.
#pragma once
#include <cstdint>

#include "../../core/smem_tile.cuh"
#include "../../core/split_fp16.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/shared.cuh"

namespace flashsci::sm80 {

// Rows are interleaved: of 16 rows, a lane's columns of two n8 blocks of scores are neighbours, 4 t
// ... 4 t + 3. Position p of a tile holds row interleaved(p).
__device__ __forceinline__ int interleaved(uint32_t p) {
  return p / 16 * 16 + p % 8 / 2 * 4 + p / 8 % 2 * 2 + p % 2;
}

// Starts copying positions [0, kRows) of a raw tile. Rows >= rows_valid and columns >= cols_valid
// become zeros and are not read. vector: rows are aligned to 16 bytes, and cols_valid is a multiple
// of 4.
template <int kRows, int kDim, int kThreads, bool kInterleaved>
__device__ __forceinline__ void load_raw(uint32_t tile, const float* __restrict__ global,
                                         int64_t row_stride, int rows_valid, int cols_valid,
                                         bool vector) {
  using Raw = Chunks<kDim / 4>;
  constexpr int kLanes = Raw::kGroup;  // threads per row
  constexpr int kStep = kThreads / kLanes;
  static_assert(kThreads % kLanes == 0 && kRows % kStep == 0, "whole passes");
  const uint32_t thread = static_cast<uint32_t>(opaque(threadIdx.x));
  const int first = thread / kLanes, lane = thread % kLanes;
  const int columns = cols_valid - lane * 4;
  if (vector && kStep % 16 == 0) {
    const int row = kInterleaved ? interleaved(first) : first;
    const uint32_t target = tile + Raw::offset(first, lane);
    const float* source = global + row * row_stride + lane * 4;
#pragma unroll
    for (int pass = 0; pass < kRows / kStep; ++pass) {
      const bool valid = row < rows_valid - pass * kStep;
      for (int block = 0; block < Raw::kChunks / kLanes; ++block)
        poison_chunk(target + pass * kStep * Raw::kRowBytes + block * kLanes * 16);
#pragma unroll
      for (int block = 0; block < Raw::kChunks / kLanes; ++block)
        ptx::cp_async_16(target + pass * kStep * Raw::kRowBytes + block * kLanes * 16,
                         source + block * kLanes * 4, valid && columns > block * kLanes * 4);
      source += kStep * row_stride;
    }
  } else {
#pragma unroll 1
    for (int position = first; position < kRows; position += kStep) {
      const int row = kInterleaved ? interleaved(position) : position;
      const float* source = global + row * row_stride + lane * 4;
#pragma unroll
      for (int block = 0; block < Raw::kChunks / kLanes; ++block) {
        const uint32_t target = tile + Raw::offset(position, lane) + block * kLanes * 16;
        const float* from = source + block * kLanes * 4;
        const int left = row < rows_valid ? columns - block * kLanes * 4 : 0;
        poison_chunk(target);
        if (vector) {
          ptx::cp_async_16(target, from, left > 0);
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            ptx::cp_async_small<4>(target + e * 4, from + e, left > e ? 4 : 0);
        }
      }
    }
  }
}

inline constexpr uint32_t kRowHidden = 1;  // not in this pass
inline constexpr uint32_t kRowZero = 2;    // of tensor 0; for tensor 1 twice that

template <int kRows, int kDim, int kThreads>
struct alignas(128) StreamStorage {
  using Tile = SplitFp16Tile<kRows, kDim>;
  float raw[2][kRows * kDim];         // [tensor, position, Chunks<kDim / 4>]
  Tile halves[2];                     // [tensor]
  uint8_t state[kRows];               // [row]: kRowHidden, kRowZero << tensor
  int32_t largest[2][kThreads / 32];  // [tensor, warp]: exponents
};

// kZerosApart: rows of zeros in tensor 1 have a separate pass, for kernels whose registers leave no
// room for drop_zero_rows.
template <int kRows, int kDim, int kThreads, bool kZerosApart = false>
struct Stream {
  using Storage = StreamStorage<kRows, kDim, kThreads>;
  using Tile = typename Storage::Tile;
  static constexpr int kAtMost = kThreads > kRows ? kThreads / kRows : 1;
  static constexpr int kParts = kAtMost < kDim / 8 ? kAtMost : kDim / 8;  // threads per row
  static constexpr int kEach = kThreads < kRows ? kRows / kThreads : 1;   // rows per thread
  using Row = RawRow<kDim, kParts>;
  static constexpr uint32_t kAllPending = (1u << kEach) - 1;
  static constexpr int kRange = 13;  // binades between the rows of a pass

  Storage& shared;
  uint32_t raw, halves;  // addresses
  int scale[2];          // the halves are row * 2^scale
  uint32_t pending;      // a bit for each row of this thread that waits for a pass
  bool chosen;           // scale has been chosen
  bool again;            // rows are left for another pass over this tile
  bool hide;             // rows are missing from this pass

  __device__ __forceinline__ explicit Stream(Storage& storage)
      : shared(storage),
        raw(ptx::shared_address(storage.raw)),
        halves(ptx::shared_address(storage.halves)),
        scale{0, 0},
        chosen(false),
        again(false) {}

  __device__ __forceinline__ uint32_t tile(int tensor) const {
    return halves + tensor * static_cast<int>(sizeof(Tile));
  }
  __device__ __forceinline__ float factor(int tensor) const { return power_of_two(-scale[tensor]); }

  __device__ __forceinline__ void load(int tensor, const float* __restrict__ rows,
                                       int64_t row_stride, int rows_valid, int cols_valid,
                                       bool vector) const {
    load_raw<kRows, kDim, kThreads, true>(raw + tensor * kRows * kDim * 4, rows, row_stride,
                                          rows_valid, cols_valid, vector);
  }

  static __device__ __forceinline__ int position(int i) { return Row::row() + i * kThreads; }
  __device__ __forceinline__ Row row(int tensor, int i) const {
    return Row(raw + tensor * kRows * kDim * 4, position(i));
  }

  // Makes halves of the raw tile, all rows at once if they fit the scales of the last tile. It ends
  // with a barrier.
  __device__ __forceinline__ void convert() {
    hide = false;
    if (!again) {
      if (chosen && !convert_all()) return;
      pending = kAllPending;
      chosen = true;
    }
    convert_some();
  }

  // Whole warps are idle if rows are few and short.
  static __device__ __forceinline__ bool idle() {
    return kThreads > kRows * kParts && Row::row() >= kRows;
  }

  // Halves of all rows with the current scales. Returns true, in all threads, if they do not fit
  // some row: no result is usable then.
  __device__ __forceinline__ bool convert_all() {
    bool misfit = false;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (idle()) break;
      uint32_t state = 0;
#pragma unroll
      for (int tensor = 0; tensor < 2; ++tensor) {
        uint32_t high = row(tensor, i).template convert<Tile>(tile(tensor), position(i),
                                                              power_of_two(scale[tensor]));
#pragma unroll
        for (int lane = Row::kLanes; lane < 32; lane *= 2)
          high = ptx::max_abs_f16x2(high, __shfl_xor_sync(0xffffffffu, high, lane));
        const uint32_t most = max(high & 0xffffu, high >> 16);
        constexpr uint32_t kTwo = 0x4000, kMost = 0x7800;  // 2 and 2^15 in fp16
        const bool doubtful = most < kTwo || most > kMost;
        if (__any_sync(0xffffffffu, doubtful)) {
          const bool empty = row(tensor, i).exponent() == kNoExponent;
          misfit |= empty ? kZerosApart && tensor == 1 : doubtful;
          if (empty) state |= kRowZero << tensor;
        }
      }
      if (Row::part() == 0) shared.state[interleaved(position(i))] = static_cast<uint8_t>(state);
    }
    return __syncthreads_or(misfit);
  }

  __device__ __forceinline__ int largest_of_all(int tensor, int exponent) {
    exponent = ptx::redux_max(exponent);
    if (threadIdx.x % 32 == 0) shared.largest[tensor][threadIdx.x / 32] = exponent;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; ++warp)
      exponent = max(exponent, shared.largest[tensor][warp]);
    return ptx::redux_max(exponent);
  }

  // Chooses scales for the largest of the pending rows, and makes halves of the rows that fit these
  // scales.
  __device__ __forceinline__ void convert_some() {
    int exponent[2][kEach];
    int largest[2] = {kNoExponent, kNoExponent};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      exponent[0][i] = exponent[1][i] = kNoExponent;
      if (idle()) break;
      exponent[0][i] = row(0, i).exponent();
      exponent[1][i] = row(1, i).exponent();
      if (pending >> i & 1) largest[0] = max(largest[0], exponent[0][i]);
    }
    largest[0] = largest_of_all(0, largest[0]);
    const auto fits = [&](int tensor, int i) {
      if (exponent[tensor][i] == kNoExponent)
        return !(kZerosApart && tensor == 1) || largest[tensor] == kNoExponent;
      return exponent[tensor][i] > largest[tensor] - kRange;
    };
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if ((pending >> i & 1) && fits(0, i)) largest[1] = max(largest[1], exponent[1][i]);
    largest[1] = largest_of_all(1, largest[1]);
    // A binade to spare: the next tile may have somewhat larger rows.
    scale[0] = scale_exponent(largest[0] + (largest[0] == kNoExponent ? 0 : 1));
    scale[1] = scale_exponent(largest[1] + (largest[1] == kNoExponent ? 0 : 1));
    bool missing = false;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (idle()) {
        pending = 0;
        break;
      }
      const bool now = (pending >> i & 1) && fits(0, i) && fits(1, i);
      uint32_t state = now ? 0 : kRowHidden;
#pragma unroll
      for (int tensor = 0; tensor < 2; ++tensor) {
        if (exponent[tensor][i] == kNoExponent) state |= kRowZero << tensor;
        if (now) {
          row(tensor, i).template convert<Tile>(tile(tensor), position(i),
                                                power_of_two(scale[tensor]));
        } else {
          Row::template clear<Tile>(tile(tensor), position(i));
        }
      }
      if (Row::part() == 0) shared.state[interleaved(position(i))] = static_cast<uint8_t>(state);
      missing |= !now;
      if (now) pending &= ~(1u << i);
    }
    hide = __syncthreads_or(missing);
    again = __syncthreads_or(pending != 0);
  }
};

}  // namespace flashsci::sm80
