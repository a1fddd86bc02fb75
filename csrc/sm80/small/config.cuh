// The calls that count as short sequences, and the shapes of their kernels.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../../core/launch.cuh"
#include "../../include/flashsci.h"

namespace flashsci::sm80::small {

inline constexpr int kMostRows = 32;  // queries, and keys
inline constexpr int kMostDim = 64;
inline constexpr int kMostWarps = 8;  // per block: neighbouring heads

// Division of numbers below 2^31 by a number that the host knows.
struct Divisor {
  uint32_t divisor, multiplier, shift;

  explicit Divisor(uint32_t by) : divisor(by), multiplier(0), shift(0) {
    while (uint64_t{1} << shift < by) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + by - 1) / by);
  }
  __device__ __forceinline__ uint32_t divide(uint32_t x) const {
    return static_cast<uint32_t>(uint64_t{x} * multiplier >> 31 >> shift);
  }
};

// Matrices of a head. A block may have all rows of some in shared memory: of the first three in the
// forward, of the first five in the backward.
enum Matrix { kQ, kK, kV, kDout, kOut, kDq, kDk, kDv, kMatrices };
inline constexpr int kOfForward = 3, kOfBackward = 5;

// Strides in bytes, multiplied on the host.
struct Steps {
  int64_t batch0;
  uint32_t batch1, head, row;

  static bool fit(const FlashsciStrides& s, int64_t size) {
    const auto fits = [=](int64_t step, int64_t most) { return step >= 0 && step * size <= most; };
    return fits(s.batch1, UINT32_MAX) && fits(s.head, UINT32_MAX) &&
           fits(s.row, INT32_MAX / kMostRows);
  }
  Steps() = default;
  Steps(const FlashsciStrides& s, int size)
      : batch0(s.batch0 * size),
        batch1(static_cast<uint32_t>(s.batch1 * size)),
        head(static_cast<uint32_t>(s.head * size)),
        row(static_cast<uint32_t>(s.row * size)) {}
};

// The heads of a call, one for each warp of a grid.
struct HeadPlan {
  uint32_t count;
  Divisor heads, batch1, group;  // group: query heads of a key head
  // For rows of a block's heads that go through shared memory (staging.cuh): pieces of 16 bytes of
  // a row, bytes from row to row, and bytes of a matrix.
  Divisor pieces;
  int pitch, matrix;
  bool plain;  // scores are products of rows times a positive scale, and all keys are visible
  bool same_strides;  // equal strides of q, k and v, of dout and out, and of the gradients
  Steps of[kMatrices];

  // size: bytes of an element; rows: of a tile; the others as the fields.
  template <class Params>
  HeadPlan(const Params& p, int size, int rows, int pieces_, int pitch_, int matrix_,
           bool same_strides_)
      : count(static_cast<uint32_t>(p.batch0 * p.batch1 * p.heads_q)),
        heads(p.heads_q),
        batch1(static_cast<uint32_t>(p.batch1)),
        group(p.heads_q / p.heads_k),
        pieces(pieces_),
        pitch(pitch_),
        matrix(matrix_),
        same_strides(same_strides_),
        plain(p.bias_mask.bias == nullptr && p.bias_mask.mask == nullptr && p.window_left < 0 &&
              p.window_right < 0 && p.seq_k == rows && p.scale > 0.f) {
    of[kQ] = Steps(p.q_strides, size);
    of[kK] = Steps(p.k_strides, size);
    of[kV] = Steps(p.v_strides, size);
    of[kOut] = Steps(p.out_strides, size);
    if constexpr (std::is_same_v<Params, FlashsciBackwardParams>) {
      of[kDout] = Steps(p.dout_strides, size);
      of[kDq] = Steps(p.dq_strides, size);
      of[kDk] = Steps(p.dk_strides, size);
      of[kDv] = Steps(p.dv_strides, size);
    }
  }
};

struct Head {
  uint32_t index, batch0, batch1, head, head_k;

  __device__ __forceinline__ Head(const HeadPlan& plan, uint32_t index_) : index(index_) {
    const uint32_t batch = plan.heads.divide(index);
    head = index - batch * plan.heads.divisor;
    batch0 = plan.batch1.divide(batch);
    batch1 = batch - batch0 * plan.batch1.divisor;
    head_k = plan.group.divide(head);
  }
  // Another head of the same batch member, if keys have the same number of heads.
  __device__ __forceinline__ Head next(uint32_t by) const {
    Head other = *this;
    other.index += by, other.head += by, other.head_k += by;
    return other;
  }
  // Bytes from the start of a tensor.
  __device__ __forceinline__ int64_t offset(const Steps& steps, uint32_t of_head) const {
    return batch0 * steps.batch0 + static_cast<int64_t>(uint64_t{batch1} * steps.batch1) +
           static_cast<int64_t>(uint64_t{of_head} * steps.head);
  }
  // Elements; Strides: of rows or of pairs.
  template <class Strides>
  __device__ __forceinline__ int64_t offset(const Strides& strides, uint32_t of_head) const {
    return batch0 * strides.batch0 + batch1 * strides.batch1 + of_head * strides.head;
  }
};

// Tiles of a warp: kBlocks x 8 queries by the same number of keys; heads of at most kUnits x 16
// columns, or, if kWhole, of exactly that number.
template <int kBlocks_, int kUnits_, bool kWhole_>
struct Shape {
  static constexpr int kBlocks = kBlocks_, kUnits = kUnits_;
  static constexpr bool kWhole = kWhole_;
  static constexpr int kTiles = (kBlocks + 1) / 2;  // m16 tiles of an operand of these rows
};

// Scores, or other values per pair, of one head: [m16, n8, fragment].
template <int kBlocks>
using Scores = float[(kBlocks + 1) / 2][kBlocks][4];

}  // namespace flashsci::sm80::small
