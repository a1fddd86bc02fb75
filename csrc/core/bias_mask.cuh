// Bias and mask on score fragments: rows g and g + 8 of each m16 block, columns 2t, 2t + 1 of each
// n8 block (lane = 4 g + t), straight from global memory.
//
// Any strides, broadcast included. Values that are the same for all queries (row stride 0: a
// padding mask, a bias per key) are read once for all rows of the fragments; neighbouring columns
// are read two at a time where memory allows. Rows and keys outside the tensor are not read.
#pragma once
#include <cmath>
#include <cstdint>

#include "../include/flashsci.h"

namespace flashsci {

// The bias and mask of one head of one batch. The strides stay in the kernel parameters and take no
// registers.
struct BiasMaskView {
  const FlashsciBiasMask& bias_mask;
  const unsigned char* bias;  // [seq_q, seq_k] or null
  const uint8_t* mask;        // [seq_q, seq_k] or null

  __device__ __forceinline__ BiasMaskView(const FlashsciBiasMask& p, uint32_t batch0,
                                          uint32_t batch1, uint32_t head)
      : bias_mask(p), bias(static_cast<const unsigned char*>(p.bias)), mask(p.mask) {
    const auto offset = [&](const FlashsciScoreStrides& strides) {
      return batch0 * strides.batch0 + batch1 * strides.batch1 + head * strides.head;
    };
    if (bias != nullptr) bias += offset(p.bias_strides) * (p.bias_is_fp32 ? 4 : 2);
    if (mask != nullptr) mask += offset(p.mask_strides);
  }
};

// A matrix of elements of 1, 2 or 4 bytes, as the fragments of one lane see it. Two neighbouring
// columns are loaded as one Pair.
template <class Value, class Pair>
struct BiasMaskMatrix {
  static_assert(sizeof(Pair) == 2 * sizeof(Value), "a pair is two elements");
  const Value* data;  // [rows, columns]
  int64_t row_stride, column_stride;
  int rows, columns;

  // One lane's part of a row: columns 0, 1 of each n8 block from `column` on; 0 past the last.
  template <int kN>
  __device__ __forceinline__ void load_row(Value (&value)[kN][2], int row, int column) const {
    const Value* start = data + min(row, rows - 1) * row_stride + column * column_stride;
    const int left = columns - column;
    if (paired()) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        Pair pair{};
        if (n * 8 < left) pair = __ldg(reinterpret_cast<const Pair*>(start + n * 8));
        value[n][0] = pair.x, value[n][1] = pair.y;
      }
    } else {
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          value[n][e] = n * 8 + e < left ? __ldg(start + (n * 8 + e) * column_stride) : Value{0};
    }
  }

  // Whether each even column of each row starts an aligned Pair and no row ends inside one.
  __device__ __forceinline__ bool paired() const {
    return column_stride == 1 && (row_stride | columns) % 2 == 0 &&
           reinterpret_cast<uint64_t>(data) % sizeof(Pair) == 0;
  }

  // Calls each(m, half, n, e, value) for all elements of the fragments.
  template <int kM, int kN, class Each>
  __device__ __forceinline__ void visit(int row, int column, Each&& each) const {
    Value value[kN][2];
    if (row_stride == 0) {
      load_row(value, 0, column);
#pragma unroll
      for (int i = 0; i < kM * 2 * kN * 2; ++i)
        each(i / (4 * kN), i / (2 * kN) % 2, i / 2 % kN, i % 2, value[i / 2 % kN][i % 2]);
    } else {
#pragma unroll
      for (int i = 0; i < kM * 2; ++i) {
        load_row(value, row + i * 8, column);
#pragma unroll
        for (int j = 0; j < kN * 2; ++j) each(i / 2, i % 2, j / 2, j % 2, value[j / 2][j % 2]);
      }
    }
  }
};

// Calls each(m, half, n, e, value) for the elements of `data` beside the scores of a lane. row: this
// lane's first row; column: that of its first score (even). kTransposed: the rows of the fragments
// are keys (row < seq_k) and their columns queries.
template <bool kTransposed, int kM, int kN, class Value, class Pair, class Each>
__device__ __forceinline__ void visit_pairs(const void* data, const FlashsciScoreStrides& strides,
                                            int row, int column, int seq_q, int seq_k,
                                            Each&& each) {
  const int rows = kTransposed ? seq_k : seq_q, columns = kTransposed ? seq_q : seq_k;
  BiasMaskMatrix<Value, Pair>{static_cast<const Value*>(data),
                              kTransposed ? strides.column : strides.row,
                              kTransposed ? strides.row : strides.column, rows, columns}
      .template visit<kM, kN>(row, column, each);
}

// s += factor * bias. factor > 0 turns units of the natural exponent into those of s. Scores outside
// the tensor keep their value or get some other bias: the window hides them.
template <class Op, bool kTransposed = false, int kM, int kN>
__device__ __forceinline__ void apply_bias(float (&s)[kM][kN][4], const BiasMaskView& view, int row,
                                           int column, int seq_q, int seq_k, float factor) {
  if (view.bias == nullptr) return;
  const FlashsciScoreStrides& strides = view.bias_mask.bias_strides;
  const auto add = [&](int m, int half, int n, int e, float bias) {
    s[m][n][half * 2 + e] = fmaf(bias, factor, s[m][n][half * 2 + e]);
  };
  if (sizeof(typename Op::Storage) == 4 || view.bias_mask.bias_is_fp32) {
    visit_pairs<kTransposed, kM, kN, float, float2>(view.bias, strides, row, column, seq_q, seq_k,
                                                    add);
  } else if constexpr (sizeof(typename Op::Storage) == 2) {
    const auto convert = [&](int m, int half, int n, int e, uint16_t bias) {
      add(m, half, n, e, Op::to_float(bias));
    };
    visit_pairs<kTransposed, kM, kN, uint16_t, ushort2>(view.bias, strides, row, column, seq_q,
                                                        seq_k, convert);
  }
}

// s = -inf where the mask hides.
template <bool kTransposed = false, int kM, int kN>
__device__ __forceinline__ void apply_mask(float (&s)[kM][kN][4], const BiasMaskView& view, int row,
                                           int column, int seq_q, int seq_k) {
  if (view.mask == nullptr) return;
  visit_pairs<kTransposed, kM, kN, uint8_t, uchar2>(
      view.mask, view.bias_mask.mask_strides, row, column, seq_q, seq_k,
      [&](int m, int half, int n, int e, uint8_t shown) {
        if (shown == 0) s[m][n][half * 2 + e] = -INFINITY;
      });
}

template <class Op, bool kTransposed = false, int kM, int kN>
__device__ __forceinline__ void apply_bias_mask(float (&s)[kM][kN][4], const BiasMaskView& view,
                                                int row, int column, int seq_q, int seq_k,
                                                float factor) {
  apply_bias<Op, kTransposed>(s, view, row, column, seq_q, seq_k, factor);
  apply_mask<kTransposed>(s, view, row, column, seq_q, seq_k);
}

}  // namespace flashsci
