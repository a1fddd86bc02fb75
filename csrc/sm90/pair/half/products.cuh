// Products of 16-bit operands for one warp, by mma of m16n8k16, and for the last eight of 24 dims
// by m16n8k8 (Op::mma_eight).
#pragma once
#include <cstdint>

#include "../../../ptx/ldmatrix.cuh"
#include "lane_map.cuh"

namespace flashsci::sm90::pair::half {

// A left operand of kWarpRows rows of a head, by eight columns: rows g and g + 8.
template <int kDim>
using Operand = uint32_t[kDim / 8][2];

// The place of heads in a row of Rows: piece x of 16 bytes of a warp's four heads, and x + 1 for
// lanes whose `odd` is 1 (x is even then). `rows` begin at a multiple of eight. The compiler knows
// everything that depends on x: an XOR and an immediate remain. (With 24 dims four heads are a
// panel and a half.)
template <int kDim>
__device__ __forceinline__ uint32_t place_of(uint32_t rows, int quad, int x, int row, int odd = 0) {
  constexpr int kPanel = sizeof(Rows<kDim>::panel[0]);
  const int panels = kDim == 32 ? quad / 2 : quad / 4 * (x / 4 == 1 ? 2 : 1);
  const int turned = kDim == 32 ? 0 : quad;
  const uint32_t start = rows + panels * kPanel + row * kPanelBytes + (odd ^ row % 8 ^ turned) * 16;
  return (start ^ x % 8 * 16) + x / 8 * kPanel;
}

// For a head's groups of eight dims: the first of a pair that begins at an even piece, and for 24
// dims the group that is left over.
template <int kDim>
__device__ __forceinline__ constexpr int pair_of(int head, int i) {
  return i * 2 + (kDim == 24 ? head % 2 : 0);
}
__device__ __forceinline__ constexpr int single_of(int head) { return head % 2 == 0 ? 2 : 0; }

template <int kDim>
__device__ __forceinline__ void load_operand(Operand<kDim>& a, uint32_t rows, int quad, int head) {
  const int lane = threadIdx.x % 32, first = head * (kDim / 8);
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    const int d = pair_of<kDim>(head, i);
    uint32_t x[4];
    ptx::ldmatrix_x4(x, place_of<kDim>(rows, quad, first + d, lane % 16, lane / 16));
#pragma unroll
    for (int j = 0; j < 4; ++j) a[d + j / 2][j % 2] = x[j];
  }
  if constexpr (kDim % 16 != 0)
    ptx::ldmatrix_x2(a[single_of(head)],
                     place_of<kDim>(rows, quad, first + single_of(head), lane % 16));
}

// C += A B^T of a head; rows of B are those of columns (cells.cuh).
template <class Op, int kDim>
__device__ __forceinline__ void multiply_transposed(float (&c)[2][4], const Operand<kDim>& a,
                                                    uint32_t b, int quad, int head) {
  const int lane = threadIdx.x % 32, first = head * (kDim / 8);
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    const int d = pair_of<kDim>(head, i);
    uint32_t x[4];
    ptx::ldmatrix_x4(x, place_of<kDim>(b, quad, first + d, row_of_column(lane % 8 + lane / 16 * 8),
                                       lane / 8 % 2));
    const uint32_t rows[4] = {a[d][0], a[d][1], a[d + 1][0], a[d + 1][1]};
    Op::mma(c[0], rows, x[0], x[1]);
    Op::mma(c[1], rows, x[2], x[3]);
  }
  if constexpr (kDim % 16 != 0) {
    const int d = single_of(head);
    uint32_t x[2];
    ptx::ldmatrix_x2(x, place_of<kDim>(b, quad, first + d, row_of_column(lane % 16)));
    Op::mma_eight(c[0], a[d], x[0]);
    Op::mma_eight(c[1], a[d], x[1]);
  }
}

// C += P B of a head; rows of B are those of P's columns.
template <class Op, int kDim>
__device__ __forceinline__ void multiply(float (&c)[kDim / 8][4], const float (&p)[2][4],
                                         uint32_t b, int quad, int head) {
  const int lane = threadIdx.x % 32, row = row_of_column(lane % 16), first = head * (kDim / 8);
  uint32_t rows[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) rows[i] = Op::pack2(p[i / 2][i % 2 * 2], p[i / 2][i % 2 * 2 + 1]);
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    const int d = pair_of<kDim>(head, i);
    uint32_t x[4];
    ptx::ldmatrix_x4_trans(x, place_of<kDim>(b, quad, first + d, row, lane / 16));
    Op::mma(c[d], rows, x[0], x[1]);
    Op::mma(c[d + 1], rows, x[2], x[3]);
  }
  if constexpr (kDim % 16 != 0) {
    const int d = single_of(head);
    uint32_t x[2];
    ptx::ldmatrix_x2_trans(x, place_of<kDim>(b, quad, first + d, row));
    Op::mma(c[d], rows, x[0], x[1]);
  }
}

}  // namespace flashsci::sm90::pair::half
