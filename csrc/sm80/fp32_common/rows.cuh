// Rows of the fp32 kernels: from memory to halves, each with its own scale, and from accumulators
// to memory; also operations on whole fragments of scores.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../../core/coord.cuh"
#include "../../core/softmax.cuh"
#include "../../core/split_fp16.cuh"
#include "../../include/flashsci.h"

namespace flashsci::sm80 {

// The rows of one head from `row` on.
template <class Row>
__device__ __forceinline__ const float* rows_of(const void* tensor, const FlashsciStrides& strides,
                                                const HeadCoord& place, uint32_t head, Row row) {
  return static_cast<const float*>(tensor) + place.offset(strides, head) + row * strides.row;
}
template <class Row>
__device__ __forceinline__ float* rows_of(void* tensor, const FlashsciStrides& strides,
                                          const HeadCoord& place, uint32_t head, Row row) {
  return static_cast<float*>(tensor) + place.offset(strides, head) + row * strides.row;
}

// Converts the raw rows in place to halves, each with its own power of two; factors [kRows] are the
// inverse factors.
template <int kRows, int kDim, int kThreads>
__device__ __forceinline__ void convert_in_place(uint32_t tile, float* factors) {
  static_assert(kThreads >= kRows, "a thread has one row or a part of it");
  using Row = RawRow<kDim, kThreads / kRows>;
  const Row row(tile, Row::row());
  float x[Row::kCount][8];
  row.load_some(x, 0);
  const int scale = scale_exponent(Row::exponent(x));
  __syncthreads();  // all threads have read their rows
  Row::template store<SplitFp16Tile<kRows, kDim>>(tile, Row::row(), x, power_of_two(scale));
  if (Row::part() == 0) factors[Row::row()] = power_of_two(-scale);
}

// Rows m * 16 + half * 8 + lane / 4 of x times factor[m][half] go to target [rows, columns].
// vector: rows take 8-byte stores.
template <int kM, int kBlocks>
__device__ __forceinline__ void store_rows_fp32(const float (&x)[kM][kBlocks][4],
                                                const float (&factor)[kM][2],
                                                float* __restrict__ target, int64_t row_stride,
                                                int rows, int columns, bool vector) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8 + lane / 4;
      if (row >= rows) continue;
      float* place = target + row * row_stride + lane % 4 * 2;
#pragma unroll
      for (int d = 0; d < kBlocks; ++d) {
        const float a = x[m][d][half * 2] * factor[m][half];
        const float b = x[m][d][half * 2 + 1] * factor[m][half];
        const int left = columns - d * 8 - lane % 4 * 2;
        if (vector) {
          if (left > 0) *reinterpret_cast<float2*>(place + d * 8) = make_float2(a, b);
        } else {
          if (left > 0) place[d * 8] = a;
          if (left > 1) place[d * 8 + 1] = b;
        }
      }
    }
  }
}

// Whether rows take 8-byte stores.
inline int takes_paired_stores(const void* data, const FlashsciStrides& s, int columns) {
  return ((s.batch0 | s.batch1 | s.head | s.row | columns) % 2 == 0) &&
         reinterpret_cast<uintptr_t>(data) % 8 == 0;
}

template <int kM, int kN>
__device__ __forceinline__ void scale_rows(float (&s)[kM][kN][4], const float (&factor)[kM][2]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i)
    s[i / (4 * kN)][i / 4 % kN][i % 4] *= factor[i / (4 * kN)][i % 4 / 2];
}

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&x)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) x[i / (4 * kN)][i / 4 % kN][i % 4] = 0.f;
}

template <int kM>
__device__ __forceinline__ void set_all(float (&factor)[kM][2], float value) {
#pragma unroll
  for (int m = 0; m < kM; ++m) factor[m][0] = factor[m][1] = value;
}

// For rows of tiny or huge numbers: the factor neither vanishes (0 times -inf) nor overflows (times
// 0).
template <int kM>
__device__ __forceinline__ void keep_finite(float (&factor)[kM][2]) {
#pragma unroll
  for (int i = 0; i < kM * 2; ++i)
    factor[i / 2][i % 2] = fminf(fmaxf(factor[i / 2][i % 2], 1.2e-38f), 3.4e38f);
}

// Scales each row to just below 2^15, by no more than 2^most; factor becomes the inverse factor.
// The least power of two in fp32 is 2^-149: together with another factor, 2^-s, most is 149 - s.
template <int kM, int kN>
__device__ __forceinline__ void normalise(float (&x)[kM][kN][4], float (&factor)[kM][2],
                                          int most = 126) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = 0.f;
#pragma unroll
      for (int n = 0; n < kN; ++n)
        largest = fmaxf(largest, fmaxf(fabsf(x[m][n][half * 2]), fabsf(x[m][n][half * 2 + 1])));
      const int scale = min(scale_exponent(exponent_of(quad_max(largest))), most);
      factor[m][half] = power_of_two(-scale);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        x[m][n][half * 2] *= power_of_two(scale);
        x[m][n][half * 2 + 1] *= power_of_two(scale);
      }
    }
  }
}

}  // namespace flashsci::sm80
