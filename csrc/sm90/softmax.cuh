// What a consumer does to accumulators: scaling, masks, online softmax, output.
#pragma once
#include <cstdint>

#include "../common/ptx/math.cuh"
#include "../common/softmax.cuh"
#include "layout.cuh"

namespace flashsci::sm90 {

// Accumulator element e of a lane is row 16 warp + lane / 4 + 8 ((e >> 1) & 1) of the warpgroup's
// 64 and column 8 (e >> 2) + 2 (lane % 4) + (e & 1).

template <int kCount>
__device__ __forceinline__ void scale_scores(float (&s)[kCount], const ForwardArgs& a) {
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

template <class C>
struct RowStatistics {
  float maximum[2];  // of rows g and g + 8, in units of 1 / exp_scale; stale by at most 2^8
  float sum[2];      // this lane's part
};

// S becomes exp2(exp_scale (S - maximum)); returns whether O must be multiplied by alpha.
template <class C, bool kFirst, int kCount>
__device__ __forceinline__ bool softmax_step(float (&s)[kCount], RowStatistics<C>& rows,
                                             float (&alpha)[2], float exp_scale) {
  float tile_max[2] = {s[0], s[2]};
#pragma unroll
  for (int e = 0; e < kCount; e += 4) {
    tile_max[0] = fmaxf(tile_max[0], fmaxf(s[e], s[e + 1]));
    tile_max[1] = fmaxf(tile_max[1], fmaxf(s[e + 2], s[e + 3]));
  }
  tile_max[0] = quad_max(tile_max[0]);
  tile_max[1] = quad_max(tile_max[1]);
  bool grew = false;
  if constexpr (kFirst) {
    rows.maximum[0] = tile_max[0];
    rows.maximum[1] = tile_max[1];
    rows.sum[0] = rows.sum[1] = 0.f;
  } else {
    // -inf before and now: NaN, not greater.
    grew = __any_sync(0xffffffffu,
                      (tile_max[0] - rows.maximum[0]) * exp_scale > kRescaleThreshold ||
                          (tile_max[1] - rows.maximum[1]) * exp_scale > kRescaleThreshold);
    alpha[0] = alpha[1] = 1.f;
    if (grew) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(rows.maximum[half], tile_max[half]);
        alpha[half] =
            next == -INFINITY ? 1.f : ptx::ex2_approx((rows.maximum[half] - next) * exp_scale);
        rows.maximum[half] = next;
        rows.sum[half] *= alpha[half];
      }
    }
  }
  const float offset[2] = {rows.maximum[0] == -INFINITY ? 0.f : rows.maximum[0] * exp_scale,
                           rows.maximum[1] == -INFINITY ? 0.f : rows.maximum[1] * exp_scale};
  float odd[2] = {0.f, 0.f};  // a second chain of additions
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const int half = e >> 1 & 1;
    s[e] = ptx::ex2_approx(fmaf(s[e], exp_scale, -offset[half]));
    if (e & 1)
      odd[half] += s[e];
    else
      rows.sum[half] += s[e];
  }
  rows.sum[0] += odd[0];
  rows.sum[1] += odd[1];
  return grew;
}

// 4x4 transposition among the lanes of a quad: word b of lane t becomes word t of lane b.
__device__ __forceinline__ void quad_transpose(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
    w[i] = odd ? got : w[i];
    w[i + 1] = odd ? w[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? w[i] : w[i + 2], 2);
    w[i] = high ? got : w[i];
    w[i + 2] = high ? w[i + 2] : got;
  }
}

// Normalises, writes lse and the output: every quad stores 64 contiguous bytes of a row at a time.
template <class Op, class C>
__device__ __forceinline__ void write_output(const float (&o)[C::kHeadDim / 2],
                                             const RowStatistics<C>& rows, const ForwardArgs& a,
                                             const PostedTile& tile, int row) {  // row: in the tile
  const int quad = threadIdx.x % 4;
  auto* out =
      static_cast<uint16_t*>(a.p.out) + tile.out_offset + row * a.p.out_strides.row + quad * 8;
  float* lse = a.p.lse + tile.lse_offset + row;
  const int rows_left = tile.seq_q - tile.row - row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(rows.sum[half]);
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    const bool valid = 8 * half < rows_left;
    if (quad == 0 && valid)
      lse[8 * half] = sum == 0.f ? -INFINITY : fmaf(rows.maximum[half], a.lse_scale, logf(sum));
    uint16_t* target = out + 8 * half * a.p.out_strides.row;
#pragma unroll
    for (int block = 0; block < C::kHeadDim / 32; ++block) {  // 32 columns
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = block * 16 + i * 4 + half * 2;
        words[i] = Op::pack2(o[e] * inverse, o[e + 1] * inverse);
      }
      quad_transpose(words);
      if (valid && block * 32 + quad * 8 < a.p.head_dim_v)
        *reinterpret_cast<uint4*>(target + block * 32) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace flashsci::sm90
