// fp32 as two fp16 halves: tensor cores reach fp32 accuracy at their fp16 rate.
//
// A number x, times a power of two that brings the largest of its row or tile below 2^15, is high +
// low: high = fp16(x) and low = fp16(x - high), with 11 significant bits each, like two TF32
// numbers. Three products of halves (low x low is left out) are then as exact as one in fp32, at
// twice the rate of three TF32 products. fp16 lacks range, so
//   - the low half of an operand in shared memory is stored 2^11 times too large: numbers down to
//     2^-29 of the largest keep all their bits, and the error of smaller ones is 2^-51 of it;
//   - P and dS, whose rows are consumed at once, get their own scale and a plain low half, with
//     errors of 2^-39 of the largest of the row.
#pragma once
#include <cstdint>

#include "../ptx/convert.cuh"
#include "../ptx/math.cuh"
#include "../ptx/shared.cuh"

namespace flashsci {

// Rows of kChunks 16-byte chunks in shared memory. The chunk index is XORed by a function of the
// row so that equal chunks of eight consecutive rows fall into eight different bank groups; an odd
// number of chunks does that by itself.
template <int kChunks_>
struct Chunks {
  static constexpr int kChunks = kChunks_;
  static constexpr int kGroup = kChunks % 8 == 0   ? 8
                                : kChunks % 4 == 0 ? 4
                                : kChunks % 2 == 0 ? 2
                                                   : 1;  // chunks permuted among themselves
  static constexpr int kRowBytes = kChunks * 16;

  static __device__ __forceinline__ int swizzle(int row) {
    return kGroup == 8 ? row & 7 : kGroup == 4 ? (row >> 1) & 3 : kGroup == 2 ? (row >> 2) & 1 : 0;
  }

  // Byte offset of a chunk.
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ swizzle(row)) * 16;
  }

  // From start = base + offset(row, c), the address of chunk c + further, where the bits of further
  // (a constant, after unrolling) and of c do not overlap.
  static __device__ __forceinline__ uint32_t at(uint32_t start, int further) {
    return (start ^ (further % kGroup * 16)) + further / kGroup * kGroup * 16;
  }
};

inline constexpr float kLowScale = 2048.f;                 // of the low half of a stored operand
inline constexpr uint32_t kInverseLowScale2 = 0x10001000;  // 2^-11, twice, in fp16
inline constexpr int kTopExponent = 14;                    // scaled numbers are below 2^15

// A tile of halves: rows of fp16.
template <int kRows, int kDim>
struct alignas(128) SplitFp16Tile {
  using Rows = Chunks<kDim / 8>;
  static constexpr int kLowBytes = kRows * kDim * 2;  // from a high half to its low half
  uint16_t high[kRows * kDim];
  uint16_t low[kRows * kDim];
};

// Two numbers, already scaled: the halves of a stored operand.
__device__ __forceinline__ void halve_stored(float x, float y, uint32_t& high, uint32_t& low) {
  high = ptx::cvt_f16x2(x, y);
  const float2 h = ptx::cvt_f32_f16x2(high);
  low = ptx::cvt_f16x2(fmaf(h.x, -kLowScale, x * kLowScale), fmaf(h.y, -kLowScale, y * kLowScale));
}

// The halves of an operand that stays in registers.
__device__ __forceinline__ void halve(float x, float y, uint32_t& high, uint32_t& low) {
  high = ptx::cvt_f16x2(x, y);
  const float2 h = ptx::cvt_f32_f16x2(high);
  low = ptx::cvt_f16x2(x - h.x, y - h.y);
}

// The exponent of the largest |x| of a row; kNoExponent for zeros.
inline constexpr int kNoExponent = -1000;
__device__ __forceinline__ int exponent_of(float x) {
  return x == 0.f ? kNoExponent : (__float_as_int(x) >> 23 & 255) - 127;
}

// The power of two that brings numbers of this exponent just below 2^15, as an exponent.
__device__ __forceinline__ int scale_exponent(int exponent) {
  return exponent == kNoExponent ? 0 : min(kTopExponent - exponent, 126);
}

// 2^e for |e| <= 126.
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

// A row of kDim numbers, fp32 and raw in shared memory (Chunks<kDim / 4>), as seen by one of the
// kParts threads of a warp that share it: numbers 8 c ... 8 c + 7 for the chunks c = first(part) +
// further(i). Threads of eight neighbouring rows are neighbours: no bank conflicts.
template <int kDim, int kParts>
struct RawRow {
  using Raw = Chunks<kDim / 4>;
  static_assert(kDim / 8 % kParts == 0, "a thread has whole chunks");
  static constexpr int kCount = kDim / 8 / kParts;
  static constexpr int kLanes = 32 / kParts;  // from one part to the next
  static __device__ __forceinline__ int part() { return threadIdx.x % 32 / kLanes; }
  // The index of this thread's row in the CTA.
  static __device__ __forceinline__ int row() {
    return threadIdx.x / 32 * kLanes + threadIdx.x % kLanes;
  }
  static __device__ __forceinline__ int first(int part) { return part; }
  static __device__ __forceinline__ constexpr int further(int i) { return i * kParts; }

  uint32_t start;  // address of chunk 2 first(part)
  __device__ __forceinline__ RawRow(uint32_t tile, int row)
      : start(tile + Raw::offset(row, 2 * first(part()))) {}

  __device__ __forceinline__ void load(float (&x)[8], int i) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = ptx::ld_shared_v4(Raw::at(start, further(i) * 2 + half));
      x[half * 4] = __uint_as_float(v.x);
      x[half * 4 + 1] = __uint_as_float(v.y);
      x[half * 4 + 2] = __uint_as_float(v.z);
      x[half * 4 + 3] = __uint_as_float(v.w);
    }
  }

  template <int kBatch>
  __device__ __forceinline__ void load_some(float (&x)[kBatch][8], int begin) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) load(x[i], begin + i);
  }

  // Exponent of the largest number of the whole row.
  __device__ __forceinline__ int exponent() const {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float x[8];
      load(x, i);
#pragma unroll
      for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(x[e]));
    }
    return exponent_of_parts(largest);
  }
  static __device__ __forceinline__ int exponent(const float (&x)[kCount][8]) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kCount * 8; ++i) largest = fmaxf(largest, fabsf(x[i / 8][i % 8]));
    return exponent_of_parts(largest);
  }
  static __device__ __forceinline__ int exponent_of_parts(float largest) {
#pragma unroll
    for (int lane = kLanes; lane < 32; lane *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lane));
    return exponent_of(largest);
  }

  // Writes the halves of chunks further(begin) ... times `scale`; returns the largest high halves.
  template <class Tile, int kBatch>
  static __device__ __forceinline__ uint32_t store(uint32_t tile, int row,
                                                   const float (&x)[kBatch][8], float scale,
                                                   int begin = 0) {
    using SplitFp16 = typename Tile::Rows;
    const uint32_t target = tile + SplitFp16::offset(row, first(part()));
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        halve_stored(x[i][2 * e] * scale, x[i][2 * e + 1] * scale, high[e], low[e]);
        largest = ptx::max_abs_f16x2(largest, high[e]);
      }
      const uint32_t to = SplitFp16::at(target, further(begin + i));
      ptx::st_shared(to, make_uint4(high[0], high[1], high[2], high[3]));
      ptx::st_shared(to + Tile::kLowBytes, make_uint4(low[0], low[1], low[2], low[3]));
    }
    return largest;
  }

  // Writes the halves of the whole row times `scale`; returns the largest high halves of this part.
  template <class Tile>
  __device__ __forceinline__ uint32_t convert(uint32_t tile, int row, float scale) const {
    constexpr int kBatch = kCount % 2 == 0 ? 2 : 1;  // chunks read at once
    uint32_t largest = 0;
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kBatch) {
      float x[kBatch][8];
      load_some(x, begin);
      largest = ptx::max_abs_f16x2(largest, store<Tile>(tile, row, x, scale, begin));
    }
    return largest;
  }

  template <class Tile>
  static __device__ __forceinline__ void clear(uint32_t tile, int row) {
    using SplitFp16 = typename Tile::Rows;
    const uint32_t target = tile + SplitFp16::offset(row, first(part()));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      ptx::st_shared(SplitFp16::at(target, further(i)), make_uint4(0, 0, 0, 0));
      ptx::st_shared(SplitFp16::at(target, further(i)) + Tile::kLowBytes, make_uint4(0, 0, 0, 0));
    }
  }
};

}  // namespace flashsci
