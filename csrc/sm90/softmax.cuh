// What a consumer does to accumulators: scaling, masks, online softmax, output.
#pragma once
#include <cstdint>

#include "../common/poison.cuh"
#include "../common/ptx/math.cuh"
#include "../common/ptx/redux.cuh"
#include "../common/ptx/shared.cuh"
#include "../common/ptx/stmatrix.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "../common/softmax.cuh"
#include "layout.cuh"

namespace flashsci::sm90 {

// Accumulator element e of a lane is row 16 warp + lane / 4 + 8 ((e >> 1) & 1) of the warpgroup's
// 64 and column 8 (e >> 2) + 2 (lane % 4) + (e & 1).

template <int kCount, class Args>
__device__ __forceinline__ void scale_scores(float (&s)[kCount], const Args& a) {
  if (a.score_mode == kSoftcap) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] = a.score_outer * tanh_accurate(a.score_inner * s[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] *= a.score_inner;
  }
}

// Scores of keys outside [begin(i), end(i)) become -inf. row: this lane's first query row; column:
// the key of its first score. Accumulator elements [kBegin, kEnd).
template <int kBegin, int kEnd, bool kLeft, int kCount>
__device__ __forceinline__ void mask_scores(float (&s)[kCount], const Window& window, int row,
                                            int column) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int limit = (kLeft ? window.begin(row + 8 * half) : window.end(row + 8 * half)) - column;
#pragma unroll
    for (int e = kBegin + 2 * half; e < kEnd; e += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = e / 4 * 8 + i;
        if (kLeft ? j < limit : j >= limit) s[e + i] = -INFINITY;
      }
    }
  }
}

// Before a row's first key: so low that whatever comes next overflows and is noticed, while hidden
// keys (-inf) still add 0.
inline constexpr float kNoKey = -3e38f;
// A lane's sum of one block beyond which the offset must follow: P stays inside fp16.
inline constexpr float kOverflow = 32768.f;
// And from which on P is computed again: it has overflowed, or its offset is so large that it
// cannot follow by small steps.
inline constexpr float kHopeless = 1 << 26;

struct RowStatistics {  // of rows g and g + 8
  float offset[2];      // P = exp2(exp_scale S - offset); about the largest score so far
  float sum[2];         // this lane's part of the sum of P
};

// An offset at a largest score, rounded down: P of that score is at least 1. Where roundings are
// large (masks written as -1e9, scores of 1e8) it would be anything beyond, and is limited.
__device__ __forceinline__ float offset_at(float maximum, float exp_scale) {
  return __fmul_rd(maximum, exp_scale);
}

// Of what this lane holds of its two rows.
template <int kCount>
__device__ __forceinline__ void lane_max(const float (&s)[kCount], float (&maximum)[2]) {
  maximum[0] = s[0], maximum[1] = s[2];
#pragma unroll
  for (int e = 0; e < kCount; e += 4) {
    maximum[0] = fmaxf(maximum[0], fmaxf(s[e], s[e + 1]));
    maximum[1] = fmaxf(maximum[1], fmaxf(s[e + 2], s[e + 3]));
  }
}

template <int kCount>
__device__ __forceinline__ void row_max(const float (&s)[kCount], float (&maximum)[2]) {
  lane_max(s, maximum);
  maximum[0] = quad_max(maximum[0]);
  maximum[1] = quad_max(maximum[1]);
}

// Elements [kBegin, kEnd) of S become P; part: this lane's sums, in four chains. kLimited: where
// the offset is known to have followed the maximum, exponents exceed the threshold only in rows of
// large scores. (The limit is on the exponent: on P it costs registers.)
template <bool kLimited, int kBegin, int kEnd, int kCount>
__device__ __forceinline__ void exponentials(float (&s)[kCount], const float (&offset)[2],
                                             float exp_scale, float (&part)[4]) {
#pragma unroll
  for (int e = kBegin; e < kEnd; ++e) {
    const float x = fmaf(s[e], exp_scale, -offset[e >> 1 & 1]);
    s[e] = ptx::ex2_approx(kLimited ? fminf(x, kRescaleThreshold) : x);
    part[e & 3] = e < 4 ? s[e] : part[e & 3] + s[e];
  }
}

template <int kCount>
__device__ __forceinline__ void limited_exponentials(float (&s)[kCount], const float (&offset)[2],
                                                     float exp_scale, float (&sum)[2]) {
  float part[4];
  exponentials<true, 0, kCount>(s, offset, exp_scale, part);
  sum[0] = part[0] + part[1];
  sum[1] = part[2] + part[3];
}

// The first block of a row: S becomes P.
template <int kCount>
__device__ __forceinline__ void softmax_first(float (&s)[kCount], RowStatistics& rows,
                                              float exp_scale) {
  float maximum[2];
  row_max(s, maximum);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    rows.offset[half] = fmaxf(offset_at(maximum[half], exp_scale), kNoKey);
  limited_exponentials(s, rows.offset, exp_scale, rows.sum);
}

// Any later block: S becomes P; returns whether O must be multiplied by alpha.
template <int kCount>
__device__ __forceinline__ bool softmax_next(float (&s)[kCount], RowStatistics& rows,
                                             float (&alpha)[2], float exp_scale) {
  float maximum[2];
  lane_max(s, maximum);
  const bool grew =
      __any_sync(0xffffffffu, fmaf(maximum[0], exp_scale, -rows.offset[0]) > kRescaleThreshold ||
                                  fmaf(maximum[1], exp_scale, -rows.offset[1]) > kRescaleThreshold);
  if (grew) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float next = fmaxf(rows.offset[half], offset_at(quad_max(maximum[half]), exp_scale));
      alpha[half] = ptx::ex2_approx(rows.offset[half] - next);
      rows.offset[half] = next;
      rows.sum[half] *= alpha[half];
    }
  }
  float sum[2];
  limited_exponentials(s, rows.offset, exp_scale, sum);
  rows.sum[0] += sum[0];
  rows.sum[1] += sum[1];
  return grew;
}

// P has grown large against an offset of earlier blocks: a power of two less of everything.
template <int kCount>
__device__ __forceinline__ void follow_growth(float (&p)[kCount], RowStatistics& rows,
                                              float (&sum)[2], float (&alpha)[2]) {
  float maximum[2];
  row_max(p, maximum);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int exponent = min(max((__float_as_int(maximum[half]) >> 23) - 127, 0), 126);
    alpha[half] = __int_as_float((127 - exponent) << 23);
    rows.offset[half] += static_cast<float>(exponent);
    rows.sum[half] *= alpha[half];
    sum[half] *= alpha[half];
  }
#pragma unroll
  for (int e = 0; e < kCount; ++e) p[e] *= alpha[e >> 1 & 1];
}

// Q K^T of 16 rows and kCount / 2 keys once more, from global memory and by mma: for the rare block
// whose exponentials overflowed, when its tiles may have left shared memory. row: this lane's first
// query row in the sequence. finish(c, n) may change the four scores of keys 8 n .. 8 n + 7.
template <class Op, int kUnrolled, int kCount, class Finish>
__device__ __forceinline__ void recompute_scores(float (&s)[kCount], const ForwardArgs& a,
                                                 const PostedTile& tile, int row, int seq_q,
                                                 int first_key, const Finish& finish) {
  const auto* q = static_cast<const uint16_t*>(a.p.q) +
                  offset_of(a.p.q_strides, tile, tile.head, tile.first_q + row);
  const auto* k = static_cast<const uint16_t*>(a.p.k) +
                  offset_of(a.p.k_strides, tile, tile.head / (a.p.heads_q / a.p.heads_k),
                            tile.first_k + first_key + threadIdx.x % 32 / 4);
  const int rows_left = seq_q - row;
  const auto pair = [&](const uint16_t* from, int column, bool valid) {
    return valid && column < a.p.head_dim ? *reinterpret_cast<const uint32_t*>(from + column) : 0u;
  };
#pragma unroll kUnrolled
  for (int n = 0; n < kCount / 4; ++n, k += 8 * a.p.k_strides.row) {
    float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int d = threadIdx.x % 4 * 2; d < a.p.head_dim; d += 16) {
      const uint16_t* below = q + 8 * a.p.q_strides.row;
      const uint32_t q_pairs[4] = {pair(q, d, rows_left > 0), pair(below, d, rows_left > 8),
                                   pair(q, d + 8, rows_left > 0),
                                   pair(below, d + 8, rows_left > 8)};
      Op::mma(c, q_pairs, pair(k, d, true), pair(k, d + 8, true));
    }
    finish(c, n);
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] = e / 4 == n ? c[e % 4] : s[e];
  }
}

// Normalises, writes lse and the output: every warp stages its rows in shared memory of its own,
// 64 columns at a time, and the copy engine stores them. Where a packed sequence ends inside a box,
// lanes store 16 bytes each.
template <class Op, class C, bool kPacked>
__device__ __forceinline__ void write_output(const float (&o)[C::kHeadDimV / 2],
                                             const RowStatistics& rows, const ForwardArgs& a,
                                             const PostedTile& tile, int seq_q,
                                             int warp_row,  // in the tile
                                             unsigned char (&staging)[C::kStaging][2048]) {
  const int lane = threadIdx.x % 32;
  const int row = ptx::redux_max(tile.row + warp_row);  // of this warp's 16 the first
  const int rows_left = ptx::redux_max(seq_q) - row;
  if (rows_left <= 0) return;
  const int tensor_row = kPacked ? tile.first_q + row : row;
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(rows.sum[half]);
    inverse[half] = sum == 0.f ? 0.f : ptx::rcp_approx(sum);
    const int i = lane / 4 + 8 * half;
    if (lane % 4 == 0 && i < rows_left) {
      const int64_t batch_head = (tile.batch0 * a.p.batch1 + tile.batch1) * a.p.heads_q + tile.head;
      a.p.lse[batch_head * a.p.seq_q + tensor_row + i] =
          sum == 0.f ? -INFINITY : (rows.offset[half] + ptx::lg2_approx(sum)) * kLn2;
    }
  }
  const bool whole = !kPacked || rows_left >= 16;
#pragma unroll
  for (int block = 0; block < C::kBoxesV; ++block) {
    const uint32_t target = ptx::shared_address(staging[block % C::kStaging]);
    // The store that had this place before is as many groups back as there are places; but for the
    // first box of a tile, where boxes are no multiple of the places.
    if (block == 0 && C::kBoxesV % C::kStaging != 0)
      ptx::bulk_wait_read<0>();
    else
      ptx::bulk_wait_read<C::kStaging - 1>();
    __syncwarp();
    poison_warp(target, 2048);
    // Rows of 128 bytes, their 16-byte chunks permuted by the row.
    const uint32_t target_row = target + lane % 16 * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // 16 columns
      const int e = block * 32 + j * 8;
      if (e >= C::kHeadDimV / 2) break;
      ptx::stmatrix_x4(target_row + ((j * 2 + lane / 16) ^ (lane % 8)) * 16,
                       Op::pack2(o[e] * inverse[0], o[e + 1] * inverse[0]),
                       Op::pack2(o[e + 2] * inverse[1], o[e + 3] * inverse[1]),
                       Op::pack2(o[e + 4] * inverse[0], o[e + 5] * inverse[0]),
                       Op::pack2(o[e + 6] * inverse[1], o[e + 7] * inverse[1]));
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (ptx::elect()) {
      if (whole)
        ptx::tma_store_5d(&a.out, target, block * 64, tensor_row, tile.head, tile.batch1,
                          tile.batch0);
      ptx::bulk_commit();  // an empty group too: the wait above counts groups
    }
    if (!whole) {
      const int column = block * 64 + lane % 8 * 8;
#pragma unroll 1
      for (int i = lane / 8; i < rows_left; i += 4) {
        const uint4 words = ptx::ld_shared_v4(target + i * 128 + ((lane % 8) ^ (i % 8)) * 16);
        uint16_t* out = static_cast<uint16_t*>(a.p.out) +
                        offset_of(a.p.out_strides, tile, tile.head, tensor_row + i) + column;
        if (column < a.p.head_dim_v) *reinterpret_cast<uint4*>(out) = words;
      }
      __syncwarp();
    }
  }
}

}  // namespace flashsci::sm90
