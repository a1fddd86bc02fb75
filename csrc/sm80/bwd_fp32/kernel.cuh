// Backward attention in fp32 on fp16 tensor cores (Ampere and newer), without atomics.
//
// Maths     P = exp(S - lse), dP = dO V^T, dS = P (dP - delta), delta_i = sum_d dO_id O_id -
//           dlse_i; dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K. Products as in
//           fwd_fp32/kernel.cuh.
// Roles     One kernel twice. kKeys: a CTA owns a tile of keys and goes through the queries of all
//           heads that share them (dK, dV: four products). Otherwise it owns a tile of queries and
//           goes through the keys (dQ and the gradient of a bias that is not shared: three
//           products; without dQ the gradient of slopes of ALiBi: two). Rows belong to the CTA,
//           16 kM to each warp; columns stream by.
// Shared    Halves of the rows of both kinds (Q and dO, or K and V), raw at first; a stream of the
//           other two; statistics of the columns if they are queries: `BackwardStorage`.
// Pipeline  As in the forward. P and dS of a tile are scaled row by row before they become halves.
// Limits    HMMA and other instructions take turns: docs/develop/kernels/sm80_fp32.md.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../../core/coord.cuh"
#include "../../core/mask.cuh"
#include "../../core/poison.cuh"
#include "../../core/softmax.cuh"
#include "../../core/varlen.cuh"
#include "../../include/flashsci.h"
#include "../fp32_common/bias_mask.cuh"
#include "../fp32_common/rows.cuh"
#include "../fp32_common/stream.cuh"
#include "../fp32_common/visible_tiles.cuh"
#include "../fp32_common/warp_mma.cuh"
#include "config.cuh"

namespace flashsci::sm80::bwd_fp32 {

// S becomes cap tanh(factor S), with factor 1 afterwards; dS, given dP - delta, takes the slope, or
// is that of capped scores. hides: scores of -inf, from a bias, stay.
template <int kM, int kN>
__device__ __forceinline__ void cap_scores(float (&s)[kM][kN][4], float (&dp)[kM][kN][4],
                                           float (&factor)[kM][2], float cap, bool hides,
                                           bool of_capped) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) {
    const int m = i / (4 * kN), n = i / 4 % kN, e = i % 4;
    float slope;
    const float x = s[m][n][e], capped = cap * tanh_accurate(factor[m][e / 2] * x, slope);
    s[m][n][e] = hides && x == -INFINITY ? x : capped;
    if (!of_capped) dp[m][n][e] *= slope;
  }
  set_all(factor, 1.f);
}

// dS of one tile to dbias [rows, columns] of this head, except hidden columns (state of the
// stream).
template <int kM, int kN>
__device__ __forceinline__ void store_bias_gradient(const float (&ds)[kM][kN][4], float* target,
                                                    const FlashsciScoreStrides& strides, int row,
                                                    int column, int rows, int columns, bool vector,
                                                    const uint8_t* state) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + m * 16 + half * 8;
      if (i >= rows) continue;
#pragma unroll
      for (int j = 0; j < kN / 2; ++j) {
        const float x[4] = {ds[m][2 * j][half * 2], ds[m][2 * j][half * 2 + 1],
                            ds[m][2 * j + 1][half * 2], ds[m][2 * j + 1][half * 2 + 1]};
        const int left = columns - column - j * 16;
        float* place = target + i * strides.row + (column + j * 16) * strides.column;
        if (vector && state == nullptr) {
          if (left > 0) *reinterpret_cast<float4*>(place) = make_float4(x[0], x[1], x[2], x[3]);
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (e < left && (state == nullptr || (state[j * 16 + e] & kRowHidden) == 0))
              place[e * strides.column] = x[e];
        }
      }
    }
  }
}

enum Rows { kQueries, kKeysBoth, kKeysK, kKeysV };  // rows that a CTA owns, gradients it makes

// A warp's results for its rows. They are separate from its other state: the compiler keeps scalars
// in the same object as looped-over arrays in memory until it has unrolled the loops.
template <class C, int kWhat>
struct BackwardRows {
  static constexpr bool kX = kWhat != kKeysV;                        // dQ or dK
  static constexpr bool kY = kWhat == kKeysBoth || kWhat == kKeysV;  // dV

  float2 statistics[C::kM][2];                   // of this lane's rows, if they are queries
  float y_factor[C::kM][2], x_factor[C::kM][2];  // of this lane's rows, with plan.inner in x's
  float dy[C::kM][kY ? C::kDimBlocks : 1][4];    // dV: [m16, n8 of Dv, fragment]
  float dx[C::kM][kX ? C::kDimBlocks : 1][4];    // dQ or dK: [m16, n8 of D, fragment]

  __device__ __forceinline__ BackwardRows() {
    clear(dx);
    clear(dy);
  }
};

// The rows that a CTA owns, of a packed sequence or of a dense one.
struct OwnRows {
  int tile, first_row, rows, first_column, columns;
  int64_t first_bias;  // BiasMaskOfHead::first_of; 0 of dense calls
};

// A warp of the CTA: the gradients of its rows, and its part of the copies and of the conversions.
// `run` is the loop over tiles of columns: the last tile comes first, and if columns are queries,
// all tiles of the last head of the group do.
template <class C, int kWhat, bool kHasBiasMask>
struct BackwardWarp {
  static constexpr bool kKeys = kWhat != kQueries;
  using Rows = BackwardRows<C, kWhat>;
  using RowTile = SplitFp16Tile<C::kBlockRows, C::kDim>;
  using ColumnTile = SplitFp16Tile<C::kBlockColumns, C::kDim>;
  using ColumnStream = Stream<C::kBlockColumns, C::kDim, C::kThreads>;
  using PairTile = BiasMaskTile<kHasBiasMask ? C::kM : 1, kHasBiasMask ? C::kN : 2>;
  using Scores = float[C::kM][C::kN][4];  // [m16, n8 of columns, fragment]
  using Factor = float[C::kM][2];
  static constexpr int kTogether = C::kM * C::kDim >= 128 ? 2 : 4;  // limited by registers
  static constexpr int kToY = sizeof(ColumnTile);  // from tile 0 of the stream to tile 1

  // A tile of columns: one of the tiles of a head of the group, < 0 if none is left.
  struct Position {
    int head, tile;
  };

  const FlashsciBackwardParams& p;
  const BackwardFp32Plan& plan;
  BackwardStorage<C>& shared;
  const HeadCoord& place;
  const OwnRows& own;
  const uint32_t group;  // query heads per key head
  const int tile_row, warp, lane, warp_row;
  const Window window;  // row r sees columns [begin(r), end(r))
  const VisibleTiles<C::kBlockColumns> visible;
  ColumnStream& stream;
  const uint32_t row_head;                                  // head of keys
  const uint32_t x_start, y_start;                          // in the halves of the rows
  const uint32_t x_rows, x_rows_high, x_dims, x_dims_high;  // in the halves of the stream
  const bool three;
  const uint32_t first_head;  // of the queries
  PairTile& pair_tile;
  Rows& rows;

  __device__ __forceinline__ BackwardWarp(BackwardStorage<C>& shared_,
                                          const FlashsciBackwardParams& p_,
                                          const BackwardFp32Plan& plan_, const HeadCoord& place_,
                                          const OwnRows& own_, ColumnStream& stream_,
                                          PairTile& pair_tile_, Rows& rows_)
      : p(p_),
        plan(plan_),
        shared(shared_),
        place(place_),
        own(own_),
        group(static_cast<uint32_t>(p.heads_q / p.heads_k)),
        tile_row(own.tile * C::kBlockRows),
        warp(ptx::redux_max(threadIdx.x / 32)),
        lane(threadIdx.x % 32),
        warp_row(tile_row + warp * C::kRows),
        window(window_of_rows()),
        visible(window, own.rows, tile_row, C::kBlockRows, warp_row, C::kRows),
        stream(stream_),
        row_head(kKeys ? place.head : place.head / group),
        x_start(start_of_a<RowTile>(ptx::shared_address(&shared.x), warp * C::kRows)),
        y_start(start_of_a<RowTile>(ptx::shared_address(&shared.y), warp * C::kRows)),
        x_rows(start_of_rows<ColumnTile>(stream.tile(0), true)),
        x_rows_high(start_of_rows<ColumnTile>(stream.tile(0), false)),
        x_dims(start_of_dims<ColumnTile>(stream.tile(0), true)),
        x_dims_high(start_of_dims<ColumnTile>(stream.tile(0), false)),
        three(p.precision == FLASHSCI_TF32X3),

        first_head(kKeys ? place.head * group : place.head),
        pair_tile(pair_tile_),
        rows(rows_) {}
  __device__ __forceinline__ Window window_of_rows() const {
    Window of(p.window_left, p.window_right, p.lower_right != 0, kKeys ? own.columns : own.rows,
              kKeys ? own.rows : own.columns);
    if (kKeys) {
      const int before = of.before;
      of.before = 1 - of.after, of.after = 1 - before, of.seq_k = own.columns;
    }
    return of;
  }

  // --- loads

  __device__ __forceinline__ void load_column_statistics(uint32_t query_head, int64_t from,
                                                         int left) const {
    const uint32_t batch = place.batch_head / static_cast<uint32_t>(p.heads_k);
    const float2* of_columns =
        plan.statistics + (static_cast<int64_t>(batch) * p.heads_q + query_head) * p.seq_q + from;
    for (int i = threadIdx.x; i < C::kBlockColumns; i += C::kThreads)
      ptx::cp_async_small<8>(ptx::shared_address(&shared.statistics[0][i]), of_columns + i,
                             i < left ? 8 : 0);
  }
  __device__ __forceinline__ void load(Position at) const {
    const int first = at.tile * C::kBlockColumns;
    const int left = own.columns - first;

    if (kKeys) {
      const uint32_t query_head = place.head * group + at.head;
      const int64_t from = own.first_column + first;
      stream.load(0, rows_of(p.q, p.q_strides, place, query_head, from), p.q_strides.row, left,
                  p.head_dim, plan.vector != 0);
      stream.load(1, rows_of(p.dout, p.dout_strides, place, query_head, from), p.dout_strides.row,
                  p.dout != nullptr ? left : 0, p.head_dim_v, plan.vector != 0);
      load_column_statistics(query_head, from, left);
    } else {
      const int64_t from = own.first_column + first;
      stream.load(0, rows_of(p.k, p.k_strides, place, row_head, from), p.k_strides.row, left,
                  p.head_dim, plan.vector != 0);
      stream.load(1, rows_of(p.v, p.v_strides, place, row_head, from), p.v_strides.row, left,
                  p.head_dim_v, plan.vector != 0);
    }
  }
  __device__ __forceinline__ BiasMaskOfHead<kKeys> bias_mask(int of_group) const {
    return BiasMaskOfHead<kKeys>(p.bias_mask, plan.bias_mask, place, first_head + of_group,
                                 own.rows, own.columns, p.lower_right != 0, own.first_bias);
  }
  __device__ __forceinline__ void load_bias_mask(Position at) {
    if constexpr (kHasBiasMask)
      pair_tile.load(bias_mask(at.head), warp_row + lane / 4,
                     at.tile * C::kBlockColumns + lane % 4 * 4);
  }
  __device__ __forceinline__ void load_row_statistics(int64_t from) {
    const float2* of_rows =
        plan.statistics + static_cast<int64_t>(place.batch_head) * p.seq_q + from;
#pragma unroll
    for (int i = 0; i < C::kM * 2; ++i) {
      const int row = warp * C::kRows + i * 8 + lane / 4;
      rows.statistics[i / 2][i % 2] =
          tile_row + row < own.rows ? __ldg(of_rows + row) : make_float2(INFINITY, 0.f);
    }
  }
  // Loads the rows, as halves, and the first tile.
  __device__ __forceinline__ void load_first(Position at) {
    load_bias_mask(at);
    const uint32_t x_tile = ptx::shared_address(&shared.x), y_tile = ptx::shared_address(&shared.y);
    const int64_t from = own.first_row + tile_row;
    const FlashsciStrides& xs = kKeys ? p.k_strides : p.q_strides;
    const FlashsciStrides& ys = kKeys ? p.v_strides : p.dout_strides;
    load_raw<C::kBlockRows, C::kDim, C::kThreads, false>(
        x_tile, rows_of(kKeys ? p.k : p.q, xs, place, place.head, from), xs.row,
        own.rows - tile_row, p.head_dim, plan.vector != 0);
    load_raw<C::kBlockRows, C::kDim, C::kThreads, false>(
        y_tile, rows_of(kKeys ? p.v : p.dout, ys, place, place.head, from), ys.row,
        kKeys || p.dout != nullptr ? own.rows - tile_row : 0, p.head_dim_v, plan.vector != 0);
    ptx::cp_async_commit();
    load(at);
    ptx::cp_async_commit();
    if (!kKeys) load_row_statistics(from);
    ptx::cp_async_wait<1>();
    __syncthreads();
    convert_in_place<C::kBlockRows, C::kDim, C::kThreads>(x_tile, shared.x_factor);
    convert_in_place<C::kBlockRows, C::kDim, C::kThreads>(y_tile, shared.y_factor);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < C::kM * 2; ++i) {
      const int row = warp * C::kRows + i * 8 + lane / 4;
      rows.x_factor[i / 2][i % 2] = shared.x_factor[row] * plan.inner;
      rows.y_factor[i / 2][i % 2] = shared.y_factor[row];
    }
  }

  // --- a tile of columns

  // The statistics of the query of a score element.
  __device__ __forceinline__ float2 statistics_of(int m, int n, int e) const {
    return kKeys ? shared.statistics[1][n / 2 * 16 + lane % 4 * 4 + n % 2 * 2 + e % 2]
                 : rows.statistics[m][e / 2];
  }
  // dP - delta, from dP in units of the halves. One factor after the other: their product may
  // underflow.
  __device__ __forceinline__ void subtract_delta(Scores& dp) const {
#pragma unroll
    for (int i = 0; i < C::kM * C::kN * 4; ++i) {
      const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
      dp[m][n][e] =
          fmaf(dp[m][n][e] * rows.y_factor[m][e / 2], stream.factor(1), -statistics_of(m, n, e).y);
    }
  }
  // Whether p.dbias, not dq, is wanted: sums for the gradient of slopes, in the registers of dq.
  __device__ __forceinline__ bool sums_slopes() const {
    return !kKeys && kHasBiasMask && p.dq == nullptr && has_slopes(p.bias_mask);
  }
  // Softcap, bias and mask; factor becomes the factor from s to exponents.
  __device__ __forceinline__ void modify_scores(Scores& s, Scores& dp, Factor& factor,
                                                int of_group) const {
#pragma unroll
    for (int i = 0; i < C::kM * 2; ++i)
      factor[i / 2][i % 2] = rows.x_factor[i / 2][i % 2] * stream.factor(0);
    if (plan.plain) {
      keep_finite(factor);
    } else {
      const bool capped = kHasBiasMask && p.bias_mask.capped != 0;
      if constexpr (kHasBiasMask) {
        if (capped) {
          pair_tile.add(s, bias_mask(of_group), factor);
          set_all(factor, plan.inverse_cap);
        }
      }
      if (plan.cap != 0.f) cap_scores(s, dp, factor, plan.cap, capped, sums_slopes() && !capped);
      if constexpr (kHasBiasMask) {
        if (!capped) pair_tile.add(s, bias_mask(of_group), factor);
        pair_tile.hide(s, bias_mask(of_group));
      } else {
        scale_rows(s, factor);
      }
      set_all(factor, kLog2e);
    }
  }
  __device__ __forceinline__ bool any_large_statistics() const {
    bool large = false;
    if constexpr (kKeys) {
#pragma unroll
      for (int i = lane; i < C::kBlockColumns; i += 32)
        large |= is_large(shared.statistics[1][i].x);
      large = __any_sync(0xffffffffu, large);
    } else {
      large = any_large(rows.statistics);
    }
    return large;
  }
  // S becomes P, no more than `most`, and dP - delta becomes dS.
  __device__ __forceinline__ void exponentiate(Scores& s, Scores& dp, const Factor& factor,
                                               float most) const {
#pragma unroll
    for (int i = 0; i < C::kM * C::kN * 4; ++i) {
      const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
      const float x =
          ptx::ex2_approx(fmaf(s[m][n][e], factor[m][e / 2], -statistics_of(m, n, e).x));
      s[m][n][e] = most == INFINITY ? x : fminf(x, most);
      dp[m][n][e] *= s[m][n][e];
    }
  }
  __device__ __forceinline__ void write_bias_gradient(const Scores& ds, int first) const {
    FlashsciScoreStrides strides = p.dbias_strides;
    strides.row = row_of_pairs(strides, plan.bias_mask.ragged, own.columns);
    store_bias_gradient(ds,
                        static_cast<float*>(p.dbias) +
                            BiasMaskOfHead<>::offset(strides, place, place.head) + own.first_bias,
                        strides, warp_row + lane / 4, first + lane % 4 * 4, own.rows, own.columns,
                        plan.vector_dbias != 0,
                        stream.hide ? stream.shared.state + lane % 4 * 4 : nullptr);
  }
  // sum += P or dS, scaled row by row, times tensor 0 or 1 of the stream.
  template <int kTensor, int kBlocks>
  __device__ __forceinline__ void add_product(float (&sum)[C::kM][kBlocks][4], Scores& by,
                                              Operand<C::kM, C::kN>& operand, Factor& factor) {
    drop_zero_rows(by, stream.shared.state, lane % 4 * 4, kTensor);
    normalise(by, factor, 149 - stream.scale[kTensor]);
#pragma unroll
    for (int i = 0; i < C::kM * 2; ++i) factor[i / 2][i % 2] *= stream.factor(kTensor);
    operand.take(by, three);
    multiply_dims<ColumnTile, C::kDim, kTogether>(sum, operand, opaque(x_dims) + kTensor * kToY,
                                                  opaque(x_dims_high) + kTensor * kToY, factor,
                                                  three);
  }
  // next: the tile whose bias and mask are loaded meanwhile.
  __device__ __forceinline__ void step(Position at, Position next) {
    const int first = at.tile * C::kBlockColumns;
    Scores s, dp;
    multiply_rows<RowTile, ColumnTile, C::kDim>(s, opaque(x_start), opaque(x_rows),
                                                opaque(x_rows_high), three);
    multiply_rows<RowTile, ColumnTile, C::kDim>(dp, opaque(y_start), opaque(x_rows) + kToY,
                                                opaque(x_rows_high) + kToY, three);
    Factor factor;
    subtract_delta(dp);
    modify_scores(s, dp, factor, at.head);
    if (stream.hide) hide_columns(s, stream.shared.state, lane % 4 * 4);
    if (first < visible.full_begin || first + C::kBlockColumns > visible.full_end)
      mask_interleaved(s, window, warp_row + lane / 4, first + lane % 4 * 4);
    if (kHasBiasMask && next.head >= 0) load_bias_mask(next);
    const bool large = any_large_statistics();
    // In the products of wide heads the limit costs nothing, and a branch costs registers.
    if (C::kDim >= 128 || large)
      exponentiate(s, dp, factor, 1.f);
    else
      exponentiate(s, dp, factor, INFINITY);
    if (!kKeys && kHasBiasMask && plan.write_bias) write_bias_gradient(dp, first);
    Operand<C::kM, C::kN> operand;
    if constexpr (Rows::kY) {
      if (p.dv != nullptr) add_product<1>(rows.dy, s, operand, factor);
    }
    if constexpr (Rows::kX) {
      if ((kKeys ? p.dk : p.dq) != nullptr) {
        add_product<0>(rows.dx, dp, operand, factor);
      } else if (sums_slopes()) {
        const int ahead = warp_row + opaque(lane) / 4 - first - opaque(lane) % 4 * 4;
        const int shift = p.lower_right != 0 ? own.columns - own.rows : 0;
        add_slope_sums(rows.dx, dp, ahead + shift,
                       [](int n, int e) { return n / 2 * 16 + n % 2 * 2 + e; });
      }
    }
  }

  __device__ __forceinline__ void write() const {
    const int64_t row = own.first_row + warp_row;
    const int left = own.rows - warp_row;
    if (sums_slopes()) {
      if constexpr (Rows::kX)
        store_slope_sums(rows.dx, 1.f,
                         static_cast<float*>(p.dbias) +
                             static_cast<int64_t>(place.batch_head) * p.seq_q + row + lane / 4,
                         left - lane / 4);
      return;
    }
    Factor factor;
    if constexpr (Rows::kX) {
      void* const to = kKeys ? p.dk : p.dq;
      const FlashsciStrides& strides = kKeys ? p.dk_strides : p.dq_strides;
      set_all(factor, p.scale);
      if (to != nullptr)
        store_rows_fp32(rows.dx, factor, rows_of(to, strides, place, place.head, row), strides.row,
                        left, p.head_dim, (kKeys ? plan.vector_dk : plan.vector_dq) != 0);
    }
    if constexpr (Rows::kY) {
      set_all(factor, 1.f);
      if (p.dv != nullptr)
        store_rows_fp32(rows.dy, factor, rows_of(p.dv, p.dv_strides, place, place.head, row),
                        p.dv_strides.row, left, p.head_dim_v, plan.vector_dv != 0);
    }
  }

  __device__ __forceinline__ void run() {
    int head = kKeys ? static_cast<int>(group) - 1 : 0, tile = visible.end_tile - 1;
    if (visible.first_tile < visible.end_tile)
      load_first({head, tile});
    else
      head = -1;
#pragma unroll 1
    while (head >= 0) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // the raw tile is complete; no warp still reads the halves of the last one
      if (kKeys) {
        for (int i = threadIdx.x; i < C::kBlockColumns; i += C::kThreads)
          shared.statistics[1][i] = shared.statistics[0][i];
      }
      stream.convert();
      const Position at{head, tile};
      const int first = at.tile * C::kBlockColumns;
      if (!stream.again && --tile < visible.first_tile) {
        --head;
        tile = visible.end_tile - 1;
      }
      if (!stream.again && head >= 0) load({head, tile});
      ptx::cp_async_commit();
      if (first < visible.seen_end && first + C::kBlockColumns > visible.seen_begin)
        step(at, {head, tile});
      else if (kHasBiasMask && head >= 0)
        load_bias_mask({head, tile});
    }
    if (warp_row < own.rows) write();
  }
};

template <class C, int kWhat, bool kHasBiasMask>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    backward_fp32_kernel(const __grid_constant__ FlashsciBackwardParams p,
                         const __grid_constant__ BackwardFp32Plan plan) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<BackwardStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));
  constexpr bool kKeys = kWhat != kQueries;
  const uint32_t tiles = plan.tiles;
  const HeadCoord place(blockIdx.x, tiles, kKeys ? p.heads_k : p.heads_q, p.batch1);
  const uint32_t slot = blockIdx.x - place.batch_head * tiles;
  OwnRows own;
  if (p.cu_seqlens_q != nullptr) {
    const TileOfSequence work = kKeys
                                    ? find_tile<C::kBlockRows>(slot, p.cu_seqlens_k, p.cu_seqlens_q,
                                                               p.num_seqs, p.seq_k, p.seq_q)
                                    : find_tile<C::kBlockRows>(slot, p.cu_seqlens_q, p.cu_seqlens_k,
                                                               p.num_seqs, p.seq_q, p.seq_k);
    own = {work.tile, work.first_q, work.seq_q, work.first_k, work.seq_k, 0};
    if constexpr (kHasBiasMask) {
      own.first_bias = BiasMaskOfHead<>::first_of(
          p, work.segment - 1, kKeys ? own.first_row : own.first_column, own.rows, own.columns);
      if (own.first_bias < 0) own.columns = 0;
    }
  } else {
    own.tile = static_cast<int>(!kKeys && p.window_right >= 0 ? tiles - 1 - slot : slot);
    own.first_row = own.first_column = 0, own.first_bias = 0;
    own.rows = kKeys ? p.seq_k : p.seq_q, own.columns = kKeys ? p.seq_q : p.seq_k;
  }
  const int tile_row = own.tile * C::kBlockRows;
  if (own.tile < 0 || tile_row >= own.rows) return;
  using Warp = BackwardWarp<C, kWhat, kHasBiasMask>;
  typename Warp::ColumnStream stream(shared.stream);
  typename Warp::PairTile pair_tile;
  typename Warp::Rows rows;
  Warp(shared, p, plan, place, own, stream, pair_tile, rows).run();
}

}  // namespace flashsci::sm80::bwd_fp32
