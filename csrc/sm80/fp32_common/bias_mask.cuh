// Bias (fp32) and mask of one tile of interleaved scores, on their way from global memory through
// registers. Scores are interleaved (stream_fp32.cuh): columns 2 t, 2 t + 1 of the n8 blocks 2 j
// and 2 j + 1 are keys 16 j + 4 t ... + 3, four neighbours that a lane reads at once.
#pragma once
#include <cmath>
#include <cstdint>

#include "../../core/alibi.cuh"
#include "../../core/coord.cuh"
#include "../../core/mask.cuh"
#include "../../core/ragged_bias.cuh"
#include "../../include/flashsci.h"
#include "stream.cuh"

namespace flashsci::sm80 {

// Values that the host derives: whether four neighbours of any row are one aligned load, and
// whether the bias has blocks of pairs (core/ragged_bias.cuh), 1 or 0.
struct BiasMaskAccess {
  int vector_bias, vector_mask, ragged;

  // The same for kernels that no packed call has.
  __device__ __forceinline__ BiasMaskAccess of_dense() const {
    return {vector_bias, vector_mask, 0};
  }
  // Of the bias and mask of a call, or of its dbias.
  template <class Params>
  static BiasMaskAccess of(const Params& p, const FlashsciBiasMask& bias_mask, int seq_k) {
    const auto aligned = [&](const void* data, const FlashsciScoreStrides& s, uint64_t bytes) {
      const int64_t strides = s.batch0 | s.batch1 | s.head | s.row;
      return s.column == 1 && (strides | seq_k) % 4 == 0 &&
             reinterpret_cast<uintptr_t>(data) % bytes == 0;
    };
    return {!has_ragged_bias(p) && aligned(bias_mask.bias, bias_mask.bias_strides, 16),
            aligned(bias_mask.mask, bias_mask.mask_strides, 4), has_ragged_pairs(p)};
  }
};

// The bias and mask of one head of one batch, as rows and columns of scores: queries and keys, or
// the other way round. The strides stay in the kernel parameters.
template <bool kTransposed = false>
struct BiasMaskOfHead {
  const FlashsciBiasMask& bias_mask;
  const BiasMaskAccess& access;
  const float* bias;    // [rows, columns] or null
  const uint8_t* mask;  // [rows, columns] or null
  int rows, columns;
  int shift;  // of the diagonal, for slopes of ALiBi in the place of the bias

  __device__ __forceinline__ BiasMaskOfHead(const FlashsciBiasMask& p, const BiasMaskAccess& a,
                                            const HeadCoord& place, uint32_t head, int rows_,
                                            int columns_, bool lower_right = false,
                                            int64_t first = 0)
      : bias_mask(p),
        access(a),
        bias(static_cast<const float*>(p.bias)),
        mask(p.mask),
        rows(rows_),
        columns(columns_),
        shift(!lower_right  ? 0
              : kTransposed ? rows - columns
                            : columns - rows) {
    if (bias != nullptr) bias += offset(p.bias_strides, place, head) + first;
    if (mask != nullptr) mask += offset(p.mask_strides, place, head);
  }
  static __device__ __forceinline__ int64_t offset(const FlashsciScoreStrides& s,
                                                   const HeadCoord& place, uint32_t head) {
    return place.batch0 * s.batch0 + place.batch1 * s.batch1 + head * s.head;
  }
  // Elements from the bias of a head to that of a sequence of a packed call, as ragged_start; its
  // gradient is at the same place.
  template <class Params>
  static __device__ __forceinline__ int64_t first_of(const Params& p, int sequence, int first_k,
                                                     int seq_q, int seq_k) {
    return has_ragged_bias(p) ? ragged_start(p.bias_mask, sequence, first_k, seq_q, seq_k)
                              : sequence * p.bias_mask.bias_strides.batch0;
  }
  // Those of the bias, with the rows of this sequence.
  __device__ __forceinline__ FlashsciScoreStrides bias_strides() const {
    FlashsciScoreStrides strides = bias_mask.bias_strides;
    strides.row = row_of_pairs(strides, access.ragged, kTransposed ? rows : columns);
    return strides;
  }
  static __device__ __forceinline__ int64_t row_stride(const FlashsciScoreStrides& s) {
    return kTransposed ? s.column : s.row;
  }
  static __device__ __forceinline__ int64_t column_stride(const FlashsciScoreStrides& s) {
    return kTransposed ? s.row : s.column;
  }
};

template <int kM, int kN>
struct BiasMaskTile {
  float4 bias[kM][2][kN / 2];     // [m16, row g or g + 8, 16 keys]: four keys
  uint32_t shown[kM][2][kN / 2];  // a byte for each of four keys

  // Starts the loads. row: this lane's first; column: the first of its first four.
  template <bool kTransposed>
  __device__ __forceinline__ void load(const BiasMaskOfHead<kTransposed>& of, int row, int column) {
    const auto each = [&](const FlashsciScoreStrides& strides, auto&& take) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t start = min(row + m * 16 + half * 8, of.rows - 1) * of.row_stride(strides) +
                                column * of.column_stride(strides);
#pragma unroll
          for (int j = 0; j < kN / 2; ++j)
            take(m, half, j, start + j * 16 * of.column_stride(strides));
        }
    };
    if (has_slopes(of.bias_mask)) {
      make_alibi(of, row, column);
    } else if (of.bias != nullptr) {
      const FlashsciScoreStrides strides = of.bias_strides();
      const int64_t step = of.column_stride(strides);
      if (!kTransposed && of.access.vector_bias) {
        each(strides, [&](int m, int half, int j, int64_t at) {
          bias[m][half][j] = column + j * 16 < of.columns
                                 ? __ldg(reinterpret_cast<const float4*>(of.bias + at))
                                 : make_float4(0.f, 0.f, 0.f, 0.f);
        });
      } else {
        each(strides, [&](int m, int half, int j, int64_t at) {
          const int left = of.columns - column - j * 16;
          const float* from = of.bias + at;
          float4& to = bias[m][half][j];
          to.x = left > 0 ? __ldg(from) : 0.f;
          to.y = left > 1 ? __ldg(from + step) : 0.f;
          to.z = left > 2 ? __ldg(from + 2 * step) : 0.f;
          to.w = left > 3 ? __ldg(from + 3 * step) : 0.f;
        });
      }
    }
    if (of.mask != nullptr) {
      const FlashsciScoreStrides& strides = of.bias_mask.mask_strides;
      const int64_t step = of.column_stride(strides);
      if (!kTransposed && of.access.vector_mask) {
        each(strides, [&](int m, int half, int j, int64_t at) {
          shown[m][half][j] = column + j * 16 < of.columns
                                  ? __ldg(reinterpret_cast<const uint32_t*>(of.mask + at))
                                  : 0;
        });
      } else {
        each(strides, [&](int m, int half, int j, int64_t at) {
          uint32_t word = 0;
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (column + j * 16 + e < of.columns)
              word |= uint32_t{__ldg(of.mask + at + e * step)} << 8 * e;
          shown[m][half][j] = word;
        });
      }
    }
  }

  // The bias that ALiBi is, in the order of the loads.
  template <bool kTransposed>
  __device__ __forceinline__ void make_alibi(const BiasMaskOfHead<kTransposed>& of, int row,
                                             int column) {
    const float slope = __ldg(of.bias);
    const int sign = kTransposed ? -1 : 1;
    const float first = static_cast<float>(sign * (row - column) + of.shift);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < kN / 2; ++j) {
          const auto term = [&](int e) {
            const int further = sign * (m * 16 + half * 8 - j * 16 - e);
            return add_alibi(0.f, slope, first + static_cast<float>(further));
          };
          bias[m][half][j] = make_float4(term(0), term(1), term(2), term(3));
        }
  }

  // Calls change(score, m, half, j, e) for all scores, beside element e of [m][half][j].
  template <class Change>
  static __device__ __forceinline__ void each(float (&s)[kM][kN][4], Change&& change) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < kN / 2; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) change(s[m][2 * j + e / 2][half * 2 + e % 2], m, half, j, e);
  }
  // s = factor s + bias, in natural units.
  template <bool kTransposed>
  __device__ __forceinline__ void add(float (&s)[kM][kN][4], const BiasMaskOfHead<kTransposed>& of,
                                      const float (&factor)[kM][2]) const {
    if (of.bias != nullptr) {
      each(s, [&](float& x, int m, int half, int j, int e) {
        const float4& b = bias[m][half][j];
        x = fmaf(x, factor[m][half], e == 0 ? b.x : e == 1 ? b.y : e == 2 ? b.z : b.w);
      });
    } else {
      each(s, [&](float& x, int m, int half, int, int) { x *= factor[m][half]; });
    }
  }
  // Scores that the mask hides become -inf.
  template <bool kTransposed>
  __device__ __forceinline__ void hide(float (&s)[kM][kN][4],
                                       const BiasMaskOfHead<kTransposed>& of) const {
    if (of.mask == nullptr) return;
    constexpr uint32_t kAll = 0x01010101;
    uint32_t all = kAll;
#pragma unroll
    for (int i = 0; i < kM * kN; ++i) all &= shown[i / kN][i / (kN / 2) % 2][i % (kN / 2)];
    if (__any_sync(0xffffffffu, all != kAll))
      each(s, [&](float& x, int m, int half, int j, int e) {
        if ((shown[m][half][j] >> 8 * e & 255) == 0) x = -INFINITY;
      });
  }
};

// Scores of keys outside the window of each row become -inf. row: this lane's first; column: the
// first of its first four.
template <int kM, int kN>
__device__ __forceinline__ void mask_interleaved(float (&s)[kM][kN][4], const Window& window,
                                                 int row, int column) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + m * 16 + half * 8;
      const int begin = window.begin(i) - column, end = window.end(i) - column;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = n / 2 * 16 + n % 2 * 2 + e;
          if (j < begin || j >= end) s[m][n][half * 2 + e] = -INFINITY;
        }
      }
    }
  }
}

// Columns whose state (Stream) has the bit become `value`. column: the first of this lane's.
template <int kM, int kN>
__device__ __forceinline__ void set_columns(float (&x)[kM][kN][4], const uint8_t* state, int column,
                                            uint32_t bit, float value) {
#pragma unroll
  for (int j = 0; j < kN / 2; ++j) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(state + column + j * 16);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (word >> 8 * e & bit) {
#pragma unroll
        for (int m = 0; m < kM; ++m)
          x[m][2 * j + e / 2][e % 2] = x[m][2 * j + e / 2][2 + e % 2] = value;
      }
    }
  }
}

// Scores of columns that are not in this pass of the stream become -inf.
template <int kM, int kN>
__device__ __forceinline__ void hide_columns(float (&s)[kM][kN][4], const uint8_t* state,
                                             int column) {
  set_columns(s, state, column, kRowHidden, -INFINITY);
}

// P or dS becomes 0 for columns whose row of that tensor is zero and so adds nothing: otherwise
// they could decide the power of two by which their neighbours become halves.
template <int kM, int kN>
__device__ __forceinline__ void drop_zero_rows(float (&x)[kM][kN][4], const uint8_t* state,
                                               int column, int tensor) {
  // Each lane has a word of the tile's states, to see whether there are any.
  static_assert(kN * 2 <= 32, "a lane for each word");
  const uint32_t word = reinterpret_cast<const uint32_t*>(state)[threadIdx.x % (kN * 2)];
  if (__any_sync(0xffffffffu, word & 0x01010101u * (kRowZero << tensor)))
    set_columns(x, state, column, kRowZero << tensor, 0.f);
}

}  // namespace flashsci::sm80
