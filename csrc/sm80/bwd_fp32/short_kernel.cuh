// Backward attention in fp32 for short rows of keys and small heads: all gradients in one pass.
//
// Maths     As kernel.cuh, with five products rather than seven: S^T = K Q^T, dP^T = V dO^T, dV +=
//           P^T dO, dK += dS^T Q, dQ += dS K.
// Roles     A CTA owns all keys of one (key head, batch), a warp 32 of them, and goes through the
//           queries in chunks of kQueries, 16 at a time. At any time its warps are at different
//           groups of 16 queries, in a fixed order: dQ is summed without atomics.
// Shared    Halves of K and V and, for a chunk, of Q and dO, each row with its own power of two; dQ
//           of the chunk: `ShortStorage`.
// Pipeline  None: other CTAs work while one waits. One barrier for every 16 queries.
// Limits    Conversions to halves, three for every score: docs/develop/kernels/sm80_fp32.md.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../../core/coord.cuh"
#include "../../core/mask.cuh"
#include "../../core/poison.cuh"
#include "../../core/softmax.cuh"
#include "../../include/flashsci.h"
#include "../../ptx/global.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/shared.cuh"
#include "../fp32_common/bias_mask.cuh"
#include "../fp32_common/rows.cuh"
#include "../fp32_common/warp_mma.cuh"
#include "config.cuh"

namespace flashsci::sm80::bwd_fp32 {

// Rows of all four operands have their own scales. A product that sums over such rows multiplies
// the scales into its other factor (P or dS), whose rows are then rescaled: rows of any size, and
// hidden keys with any contents, need no further pass.

template <int kDim_, int kWarps_, int kQueries_, int kMinBlocks_>
struct ShortTile {
  static constexpr int kDim = kDim_, kWarps = kWarps_, kQueries = kQueries_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarps * 32, kKeys = kWarps * 32;  // at most; a multiple of 32
  static constexpr int kDimBlocks = kDim / 8;
  static constexpr int kSumStride = kDim + 8;  // for dQ: no bank conflicts
};

template <class C>
struct alignas(128) ShortStorage {
  SplitFp16Tile<C::kKeys, C::kDim> k, v;
  SplitFp16Tile<C::kQueries, C::kDim> q, dout;
  float k_factor[C::kKeys], v_factor[C::kKeys];  // factors of the halves of a row
  float4 queries[C::kQueries];                   // lse in log2 units, delta, factors of Q, of dO
  float dq[C::kQueries * C::kSumStride];
  HeadCoord place[1];   // batch_head is the index of the batch alone
  uint32_t first_head;  // of the queries
};

// Keys of a warp: a lane has four neighbours, 4 g ... 4 g + 3, as rows g, g + 8 of both m16 blocks.
__device__ __forceinline__ int place_of_key(int key) {
  return key / 32 * 32 + key % 4 * 8 + key % 32 / 4;
}

// Converts rows [0, count) of a tensor to halves, zeros from rows_valid and cols_valid on; put(row,
// factor). The factor of a row of zeros is 0: P and dS are multiplied by it, so that the
// multipliers of such a row (padding) do not decide the power of two of their neighbours.
template <class Tile, int kDim, bool kOfKeys, class Put>
__device__ __forceinline__ void load_split_fp16(uint32_t tile, const float* __restrict__ global,
                                                int64_t row_stride, int count, int rows_valid,
                                                int cols_valid, bool vector, Put&& put) {
  constexpr int kParts = kDim / 8;  // threads per row
  using SplitFp16 = typename Tile::Rows;
#pragma unroll 1
  for (int i = threadIdx.x; i < count * kParts; i += blockDim.x) {
    const int row = i / kParts, part = i % kParts, left = cols_valid - part * 8;
    const float* from = global + row * row_stride + part * 8;
    float x[8] = {};
    if (row < rows_valid) {
      if (vector) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (left <= half * 4) continue;
          const float4 y = __ldg(reinterpret_cast<const float4*>(from) + half);
          x[half * 4] = y.x, x[half * 4 + 1] = y.y, x[half * 4 + 2] = y.z, x[half * 4 + 3] = y.w;
        }
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (e < left) x[e] = __ldg(from + e);
      }
    }
    float largest = 0.f;
#pragma unroll
    for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(x[e]));
#pragma unroll
    for (int step = 1; step < kParts; step *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    const int exponent = scale_exponent(exponent_of(largest));
    const float scale = power_of_two(exponent);
    uint32_t high[4], low[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      halve_stored(x[2 * e] * scale, x[2 * e + 1] * scale, high[e], low[e]);
    const uint32_t to = tile + SplitFp16::offset(kOfKeys ? place_of_key(row) : row, part);
    ptx::st_shared(to, make_uint4(high[0], high[1], high[2], high[3]));
    ptx::st_shared(to + Tile::kLowBytes, make_uint4(low[0], low[1], low[2], low[3]));
    if (part == 0) put(row, largest == 0.f ? 0.f : power_of_two(-exponent));
  }
}

// Four neighbouring keys of each of two neighbouring queries.
template <class Element, class Vector>
__device__ __forceinline__ void load_four_keys(Vector (&to)[2], const Element* from, int64_t row,
                                               int64_t column, int queries, int keys, bool vector) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const Element* at = from + c * row;
    to[c] = Vector{};
    if (c >= queries) continue;
    if (vector) {
      if (keys > 0) to[c] = __ldg(reinterpret_cast<const Vector*>(at));
    } else {
#pragma unroll
      for (int r = 0; r < 4; ++r)
        if (r < keys) reinterpret_cast<Element*>(&to[c])[r] = __ldg(at + r * column);
    }
  }
}

__device__ __forceinline__ float part(const float4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Gradients of a warp's keys. They are separate from its other state: the compiler keeps scalars in
// the same object as looped-over arrays in memory until it has unrolled the loops.
template <class C>
struct ShortRows {
  float dv[2][C::kDimBlocks][4], dk[2][C::kDimBlocks][4];  // [m16 of keys, n8 of dims, fragment]

  __device__ __forceinline__ ShortRows() {
    clear(dk);
    clear(dv);
  }
};

// A warp of the CTA: its keys, and its part of the loads. `run` is the loop over chunks of queries,
// `pass` the loop over groups of 16 queries of a chunk, `step` the work on one group.
template <class C>
struct ShortWarp {
  using KeyTile = SplitFp16Tile<C::kKeys, C::kDim>;
  using QueryTile = SplitFp16Tile<C::kQueries, C::kDim>;
  using Scores = float[2][2][4];  // [m16 of keys, n8 of queries, fragment]
  static constexpr int kToV = sizeof(KeyTile), kToDout = sizeof(QueryTile);
  static constexpr bool kPrefetch = C::kDim <= 16;  // limited by registers

  // Queries of one of the heads that share the keys; tiles of 16.
  struct Chunk {
    int member;
    uint32_t first;
    int rows, tiles;
  };

  const FlashsciBackwardParams& p;
  const BackwardFp32Plan& plan;
  ShortStorage<C>& shared;
  const int warp, warps, lane;
  const bool three;
  const Window window;
  const int first_key, lane_key;
  const uint32_t k_tile, v_tile, q_tile, k_start;
  const int warp_bytes;  // from the first key to the warp's
  ShortRows<C>& keys;

  __device__ __forceinline__ ShortWarp(ShortStorage<C>& shared_, const FlashsciBackwardParams& p_,
                                       const BackwardFp32Plan& plan_, int warp_, int warps_,
                                       int lane_, ShortRows<C>& keys_)
      : p(p_),
        plan(plan_),
        shared(shared_),
        warp(warp_),
        warps(warps_),
        lane(lane_),
        three(p.precision == FLASHSCI_TF32X3),
        window(
            uniform(Window(p.window_left, p.window_right, p.lower_right != 0, p.seq_q, p.seq_k))),
        first_key(warp * 32),
        lane_key(first_key + lane / 4 * 4),
        k_tile(ptx::shared_address(&shared.k)),
        v_tile(ptx::shared_address(&shared.v)),
        q_tile(ptx::shared_address(&shared.q)),
        k_start(start_of_a<KeyTile>(k_tile, first_key)),
        warp_bytes(first_key * KeyTile::Rows::kRowBytes),
        keys(keys_) {}
  static __device__ __forceinline__ Window uniform(Window window) {
    window.before = ptx::redux_max(window.before);
    window.after = ptx::redux_max(window.after);
    return window;
  }

  // The place, read again rather than kept in registers; head: of the queries.
  __device__ __forceinline__ HeadCoord find(int member, uint32_t& head) const {
    const HeadCoord place = shared.place[opaque(0)];
    head = shared.first_head + member;
    return place;
  }
  __device__ __forceinline__ int64_t offset_of_keys(const FlashsciStrides& strides) const {
    const HeadCoord place = shared.place[opaque(0)];
    return place.offset(strides, place.head);
  }
  __device__ __forceinline__ int64_t offset_of_pairs(const FlashsciScoreStrides& strides,
                                                     int member) const {
    uint32_t head;
    const HeadCoord place = find(member, head);
    return BiasMaskOfHead<>::offset(strides, place, head);
  }

  // --- loads

  __device__ __forceinline__ void load_keys() {
    load_split_fp16<KeyTile, C::kDim, true>(
        k_tile, static_cast<const float*>(p.k) + offset_of_keys(p.k_strides), p.k_strides.row,
        blockDim.x, p.seq_k, p.head_dim, plan.vector != 0,
        [&](int row, float factor) { shared.k_factor[row] = factor; });
    load_split_fp16<KeyTile, C::kDim, true>(
        v_tile, static_cast<const float*>(p.v) + offset_of_keys(p.v_strides), p.v_strides.row,
        blockDim.x, p.seq_k, p.head_dim_v, plan.vector != 0,
        [&](int row, float factor) { shared.v_factor[row] = factor; });
  }
  template <class Put>
  __device__ __forceinline__ void load_queries(const Chunk& chunk, uint32_t to, const void* from,
                                               const FlashsciStrides& strides, int valid,
                                               int columns, Put&& put) {
    uint32_t head;
    const HeadCoord place = find(chunk.member, head);
    const int64_t offset = place.offset(strides, head);
    load_split_fp16<QueryTile, C::kDim, false>(
        to, static_cast<const float*>(from) + offset + chunk.first * strides.row, strides.row,
        chunk.tiles * 16, valid, columns, plan.vector != 0, put);
  }
  __device__ __forceinline__ void load_statistics(const Chunk& chunk) {
    uint32_t head;
    const HeadCoord place = find(chunk.member, head);
    const float2* statistics =
        plan.statistics + (static_cast<int64_t>(place.batch_head) * p.heads_q + head) * p.seq_q +
        chunk.first;
    for (int i = threadIdx.x; i < chunk.tiles * 16; i += blockDim.x) {
      const float2 x = i < chunk.rows ? __ldg(statistics + i) : make_float2(INFINITY, 0.f);
      shared.queries[i].x = x.x, shared.queries[i].y = x.y;
    }
  }
  // Q and dO as halves, the statistics of the queries, and zeros in dQ.
  __device__ __forceinline__ void load(const Chunk& chunk) {
    load_queries(chunk, q_tile, p.q, p.q_strides, chunk.rows, p.head_dim,
                 [&](int row, float factor) { shared.queries[row].z = factor; });
    load_queries(chunk, q_tile + kToDout, p.dout, p.dout_strides,
                 p.dout != nullptr ? chunk.rows : 0, p.head_dim_v,
                 [&](int row, float factor) { shared.queries[row].w = factor; });
    load_statistics(chunk);
#pragma unroll 1
    for (int i = threadIdx.x; i < chunk.tiles * 16 * C::kSumStride; i += blockDim.x)
      shared.dq[i] = 0.f;
  }
  // Prefetches the bias of 16 queries into the second-level cache, a step ahead.
  __device__ __forceinline__ void prefetch_bias(const Chunk& chunk, int tile) const {
    const FlashsciScoreStrides& s = p.bias_mask.bias_strides;
    if (!plan.bias_mask.vector_bias || tile >= chunk.tiles || lane_key >= p.seq_k) return;
    const int query = chunk.first + tile * 16 + lane % 4 * 2;
    const float* from = static_cast<const float*>(p.bias_mask.bias) +
                        offset_of_pairs(s, chunk.member) + lane_key * s.column;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::prefetch_l2(from + min(query + i / 2 * 8 + i % 2, p.seq_q - 1) * s.row);
  }

  // --- scores of 8 queries, the n-th of two blocks; row: the first of this lane's two

  // From halves to S in natural units (or those of the cap) and to dP - delta.
  __device__ __forceinline__ void scale(Scores& s, Scores& dp, int n, const float4 (&of)[2]) const {
    const int here = opaque(lane_key);  // read again rather than kept
    const float4 k_factor = *reinterpret_cast<const float4*>(shared.k_factor + here);
    const float4 v_factor = *reinterpret_cast<const float4*>(shared.v_factor + here);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int m = i / 4, e = i % 4, r = m * 2 + e / 2;
      s[m][n][e] *= part(k_factor, r) * plan.inner * of[e % 2].z;
      dp[m][n][e] = fmaf(dp[m][n][e] * part(v_factor, r), of[e % 2].w, -of[e % 2].y);
    }
  }
  // hides: scores in natural units come with their bias; those of -inf stay.
  __device__ __forceinline__ void cap(Scores& s, Scores& dp, int n, bool hides) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = s[i / 4][n][i % 4];
      float slope;
      const float capped = plan.cap * tanh_accurate(hides ? x * plan.inverse_cap : x, slope);
      x = hides && x == -INFINITY ? x : capped;
      dp[i / 4][n][i % 4] *= slope;
    }
  }
  // Softcap and bias, in this order or, if `capped`, the other one. A loop: the code of each is there
  // once.
  __device__ __forceinline__ void cap_and_add(Scores& s, Scores& dp, int n, int row,
                                              int member) const {
    const bool capped = p.bias_mask.capped != 0;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (capped == (turn != 0)) {
        if (plan.cap != 0.f) cap(s, dp, n, capped);
      } else if (p.bias_mask.bias != nullptr) {
        add_bias(s, n, row, member);
      }
    }
  }
  __device__ __forceinline__ void add_bias(Scores& s, int n, int row, int member) const {
    const FlashsciScoreStrides& strides = p.bias_mask.bias_strides;
    if (has_slopes(p.bias_mask)) {
      const float slope =
          __ldg(static_cast<const float*>(p.bias_mask.bias) + offset_of_pairs(strides, member));
      const int ahead = row - lane_key + (p.lower_right != 0 ? p.seq_k - p.seq_q : 0);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int further = i % 2 - (i / 4 * 2 + i % 4 / 2);
        s[i / 4][n][i % 4] =
            add_alibi(s[i / 4][n][i % 4], slope, static_cast<float>(ahead + further));
      }
      return;
    }
    float4 bias[2];
    load_four_keys(bias,
                   static_cast<const float*>(p.bias_mask.bias) + offset_of_pairs(strides, member) +
                       row * strides.row + lane_key * strides.column,
                   strides.row, strides.column, p.seq_q - row, p.seq_k - lane_key,
                   plan.bias_mask.vector_bias != 0);
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i / 4][n][i % 4] += part(bias[i % 2], i / 4 * 2 + i % 4 / 2);
  }
  __device__ __forceinline__ void hide_masked(Scores& s, Scores& dp, int n, int row,
                                              int member) const {
    const FlashsciScoreStrides& strides = p.bias_mask.mask_strides;
    uchar4 shown[2];
    load_four_keys(shown,
                   p.bias_mask.mask + offset_of_pairs(strides, member) + row * strides.row +
                       lane_key * strides.column,
                   strides.row, strides.column, p.seq_q - row, p.seq_k - lane_key,
                   plan.bias_mask.vector_mask != 0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i / 4 * 2 + i % 4 / 2;
      if (reinterpret_cast<const uint8_t*>(&shown[i % 2])[r] == 0)
        s[i / 4][n][i % 4] = -INFINITY, dp[i / 4][n][i % 4] = 0.f;
    }
  }
  __device__ __forceinline__ void hide_unseen(Scores& s, Scores& dp, int n, int row) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = lane_key + i / 4 * 2 + i % 4 / 2;
      if (key < window.begin(row + i % 2) || key >= window.end(row + i % 2))
        s[i / 4][n][i % 4] = -INFINITY, dp[i / 4][n][i % 4] = 0.f;
    }
  }
  // S becomes P, and dP - delta becomes dS.
  __device__ __forceinline__ void exponentiate(Scores& s, Scores& dp, int n,
                                               const float4 (&of)[2]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = s[i / 4][n][i % 4];
      x = ptx::ex2_approx(fmaf(x, kLog2e, -of[i % 2].x));
    }
    if (__any_sync(0xffffffffu, is_large(of[0].x) || is_large(of[1].x))) {
#pragma unroll
      for (int i = 0; i < 8; ++i) s[i / 4][n][i % 4] = fminf(s[i / 4][n][i % 4], 1.f);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) dp[i / 4][n][i % 4] *= s[i / 4][n][i % 4];
  }
  __device__ __forceinline__ void write_bias_gradient(const Scores& ds, int n, int row,
                                                      int member) const {
    const FlashsciScoreStrides& strides = p.dbias_strides;
    const int left = p.seq_k - lane_key;
    float* target = static_cast<float*>(p.dbias) + offset_of_pairs(strides, member) +
                    row * strides.row + lane_key * strides.column;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (row + c >= p.seq_q) continue;
      float* to = target + c * strides.row;
      if (plan.vector_dbias) {
        if (left > 0)
          *reinterpret_cast<float4*>(to) =
              make_float4(ds[0][n][c], ds[0][n][c + 2], ds[1][n][c], ds[1][n][c + 2]);
      } else {
#pragma unroll
        for (int r = 0; r < 4; ++r)
          if (r < left) to[r * strides.column] = ds[r / 2][n][r % 2 * 2 + c];
      }
    }
  }

  // --- gradients from 16 queries; s is consumed, then dp

  // sum += s^T times rows of Q or dO, kTo + tile_bytes from the first halves of Q. kTo is not part
  // of tile_bytes: such a sum would be kept in a register.
  template <int kTo>
  __device__ __forceinline__ void add_product(float (&sum)[2][C::kDimBlocks][4], Scores& s,
                                              int tile_bytes) {
    float factor[2][2];
    normalise(s, factor);
    Operand<2, 2> operand;
    operand.take(s, three);
    multiply_dims<QueryTile, C::kDim, 2>(
        sum, operand, start_of_dims<QueryTile>(opaque(q_tile), true) + tile_bytes + kTo,
        start_of_dims<QueryTile>(opaque(q_tile), false) + tile_bytes + kTo, factor, three);
  }
  __device__ __forceinline__ void add_dv(Scores& s, const float4* queries, int tile_bytes) {
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i / 8][i / 4 % 2][i % 4] *= queries[i / 4 % 2 * 8 + i % 2].w;
    add_product<kToDout>(keys.dv, s, tile_bytes);
  }
  __device__ __forceinline__ void add_dk(Scores& s, const Scores& dp, const float4* queries,
                                         int tile_bytes) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      s[i / 8][i / 4 % 2][i % 4] = dp[i / 8][i / 4 % 2][i % 4] * queries[i / 4 % 2 * 8 + i % 2].z;
    add_product<0>(keys.dk, s, tile_bytes);
  }
  // Scales dS by query, which are columns; of_column: the inverse factors.
  __device__ __forceinline__ void normalise_columns(Scores& dp, float (&of_column)[2][2]) const {
    const float4 k_factor = *reinterpret_cast<const float4*>(shared.k_factor + opaque(lane_key));
#pragma unroll
    for (int i = 0; i < 16; ++i)
      dp[i / 8][i / 4 % 2][i % 4] *= part(k_factor, i / 8 * 2 + i % 4 / 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = i / 2, c = i % 2;
      float largest = fmaxf(fmaxf(fabsf(dp[0][n][c]), fabsf(dp[0][n][c + 2])),
                            fmaxf(fabsf(dp[1][n][c]), fabsf(dp[1][n][c + 2])));
#pragma unroll
      for (int step_ = 4; step_ < 32; step_ *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step_));
      const int scale = scale_exponent(exponent_of(largest));
      of_column[n][c] = power_of_two(-scale);
#pragma unroll
      for (int r = 0; r < 4; ++r) dp[r / 2][n][r % 2 * 2 + c] *= power_of_two(scale);
    }
  }
  // dQ of the 16 queries, in shared memory: no other warp works on them.
  __device__ __forceinline__ void add_dq(Scores& dp, int tile) {
    float of_column[2][2];
    normalise_columns(dp, of_column);
    Operand<1, 4> operand;  // 16 queries x 32 keys: the halves turn into rows of queries
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int m = i / 4, half = i / 2 % 2, n = i % 2;
      uint32_t high, low;
      halve(dp[m][n][half * 2], dp[m][n][half * 2 + 1], high, low);
      operand.high[0][m][half * 2 + n] = ptx::movmatrix_trans(high);
      operand.low[0][m][half * 2 + n] = ptx::movmatrix_trans(low);
    }
    float of_row[1][2], dq[1][C::kDimBlocks][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float even = __shfl_sync(0xffffffffu, of_column[n][0], lane / 8);
      const float odd = __shfl_sync(0xffffffffu, of_column[n][1], lane / 8);
      of_row[0][n] = lane / 4 % 2 == 0 ? even : odd;
    }
    clear(dq);
    multiply_dims<KeyTile, C::kDim, 2>(
        dq, operand, start_of_dims<KeyTile>(opaque(k_tile), true) + warp_bytes,
        start_of_dims<KeyTile>(opaque(k_tile), false) + warp_bytes, of_row, three);
    float* sum = shared.dq + (tile * 16 + lane / 4) * C::kSumStride + lane % 4 * 2;
#pragma unroll
    for (int d = 0; d < C::kDimBlocks; ++d) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        auto& to = *reinterpret_cast<float2*>(sum + half * 8 * C::kSumStride + d * 8);
        to.x += dq[0][d][half * 2];
        to.y += dq[0][d][half * 2 + 1];
      }
    }
  }

  // 16 queries from `first` to `last`.
  __device__ __forceinline__ void step(const Chunk& chunk, int tile, int first, int last) {
    const int query = first + lane % 4 * 2;  // this lane's first
    const int tile_bytes = tile * 16 * QueryTile::Rows::kRowBytes;
    Scores s, dp;
    multiply_rows<KeyTile, QueryTile, C::kDim>(
        s, opaque(k_start), start_of_rows<QueryTile>(opaque(q_tile), true) + tile_bytes,
        start_of_rows<QueryTile>(opaque(q_tile), false) + tile_bytes, three);
    multiply_rows<KeyTile, QueryTile, C::kDim>(
        dp, opaque(k_start) + kToV,
        start_of_rows<QueryTile>(opaque(q_tile), true) + tile_bytes + kToDout,
        start_of_rows<QueryTile>(opaque(q_tile), false) + tile_bytes + kToDout, three);
    const float4* queries = shared.queries + tile * 16 + opaque(lane) % 4 * 2;
    const bool partial = window.begin(last) > first_key || window.end(first) < first_key + 32;
#pragma unroll
    for (int n = 0; n < 2; ++n) {  // one after the other, for lack of registers
      const int row = query + n * 8;
      const float4 of[2] = {queries[n * 8], queries[n * 8 + 1]};
      scale(s, dp, n, of);
      cap_and_add(s, dp, n, row, chunk.member);
      if (p.bias_mask.mask != nullptr) hide_masked(s, dp, n, row, chunk.member);
      if (partial) hide_unseen(s, dp, n, row);
      exponentiate(s, dp, n, of);
      if (plan.write_bias) write_bias_gradient(dp, n, row, chunk.member);
    }
    if (p.dv != nullptr) add_dv(s, queries, tile_bytes);
    if (p.dk != nullptr) add_dk(s, dp, queries, tile_bytes);
    if (p.dq != nullptr) add_dq(dp, tile);
  }
  __device__ __forceinline__ void pass(const Chunk& chunk) {
    const int steps = max(chunk.tiles, warps);
    if (kPrefetch && p.bias_mask.bias != nullptr) prefetch_bias(chunk, warp);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const int tile = i + warp < steps ? i + warp : i + warp - steps;
      if (kPrefetch && p.bias_mask.bias != nullptr)
        prefetch_bias(chunk, tile + 1 < steps ? tile + 1 : 0);
      const int first = chunk.first + tile * 16, last = min(first + 16, p.seq_q) - 1;
      if (tile < chunk.tiles && window.begin(first) < first_key + 32 &&
          window.end(last) > first_key)
        step(chunk, tile, first, last);
      __syncthreads();  // the warps move to other queries
    }
  }

  __device__ __forceinline__ void write_dq(const Chunk& chunk) const {
    uint32_t head;
    const HeadCoord place = find(chunk.member, head);
    float* target = static_cast<float*>(p.dq) + place.offset(p.dq_strides, head) +
                    chunk.first * p.dq_strides.row;
#pragma unroll 1
    for (int i = threadIdx.x;
         i < min(p.seq_q - static_cast<int>(chunk.first), C::kQueries) * C::kDim; i += blockDim.x) {
      const int row = i / C::kDim, d = i % C::kDim;
      if (d < p.head_dim)
        target[row * p.dq_strides.row + d] = shared.dq[row * C::kSumStride + d] * p.scale;
    }
  }
  // Rows of a lane are neighbours.
  __device__ __forceinline__ void write(const float (&x)[2][C::kDimBlocks][4], void* to,
                                        const FlashsciStrides& strides, int columns,
                                        float scale) const {
    if (to == nullptr) return;
    float* target =
        static_cast<float*>(to) + offset_of_keys(strides) + lane_key * strides.row + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (lane_key + r >= p.seq_k) continue;
#pragma unroll
      for (int i = 0; i < C::kDimBlocks * 2; ++i)
        if (i / 2 * 8 + lane % 4 * 2 + i % 2 < columns)
          target[r * strides.row + i / 2 * 8 + i % 2] = x[r / 2][i / 2][r % 2 * 2 + i % 2] * scale;
    }
  }

  __device__ __forceinline__ void run() {
    load_keys();
#pragma unroll 1
    for (int member = ptx::redux_max(p.heads_q / p.heads_k - 1); member >= 0; --member) {
#pragma unroll 1
      for (uint32_t first = 0; first < static_cast<uint32_t>(p.seq_q); first += C::kQueries) {
        const int rows = min(p.seq_q - static_cast<int>(first), C::kQueries);
        const Chunk chunk{member, first, rows, (rows + 15) / 16};
        __syncthreads();  // no warp still reads the previous chunk
        load(chunk);
        __syncthreads();
        pass(chunk);
        if (p.dq != nullptr) write_dq(chunk);
      }
    }
    write(keys.dk, p.dk, p.dk_strides, p.head_dim, p.scale);
    write(keys.dv, p.dv, p.dv_strides, p.head_dim_v, 1.f);
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    backward_short_fp32_kernel(const __grid_constant__ FlashsciBackwardParams p,
                               const __grid_constant__ BackwardFp32Plan plan) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<ShortStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));
  const int warp = ptx::redux_max(threadIdx.x / 32), warps = blockDim.x / 32;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    HeadCoord place(blockIdx.x, 1, p.heads_k, p.batch1);
    place.batch_head /= static_cast<uint32_t>(p.heads_k);
    shared.place[0] = place;
    shared.first_head = place.head * static_cast<uint32_t>(p.heads_q / p.heads_k);
  }
  __syncthreads();
  ShortRows<C> keys;
  ShortWarp<C>(shared, p, plan, warp, warps, lane, keys).run();
}

}  // namespace flashsci::sm80::bwd_fp32
