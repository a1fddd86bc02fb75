// Backward attention in fp32 on fp16 tensor cores (Ampere and newer), without atomics.
//
// Maths     P = exp(S - lse), dP = dO V^T, dS = P (dP - delta), delta_i = sum_d dO_id O_id -
//           dlse_i; dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K. Products as in
//           fwd_fp32/kernel.cuh.
// Roles     One kernel twice. kKeys: a CTA owns a tile of keys and goes through the queries of all
//           heads that share them (dK, dV: four products). Else it owns a tile of queries and goes
//           through the keys (dQ and the gradient of a bias that is not shared: three products).
//           Rows are what the CTA owns, 16 kM of each warp; columns are what streams by.
// Shared    Halves of the rows of both kinds (Q and dO, or K and V), raw at first; a stream of the
//           other two; statistics of the columns if they are queries: `BackwardStorage`.
// Pipeline  As in the forward. P and dS of a tile are scaled row by row before they become halves.
// Limits    HMMA and everything else take turns: docs/kernels/sm80_fp32.md.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../core/head_coord.cuh"
#include "../../core/mask.cuh"
#include "../../core/poison.cuh"
#include "../../core/softmax.cuh"
#include "../../core/varlen.cuh"
#include "../../include/flashsci.h"
#include "../fp32/bias_mask.cuh"
#include "../fp32/rows.cuh"
#include "../fp32/stream.cuh"
#include "../fp32/warp_mma.cuh"

namespace flashsci::sm80::bwd_fp32 {

static_assert(std::is_trivially_copyable_v<FlashsciBackwardParams>, "passed to kernels by value");

template <int kDim_, int kWarps_, int kM_, int kN_, int kMinBlocks_>
struct BackwardTile {
  static constexpr int kDim = kDim_, kWarps = kWarps_, kM = kM_, kN = kN_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kM * 16;  // of a warp
  static constexpr int kBlockRows = kRows * kWarps, kBlockColumns = kN * 8;
  static constexpr int kDimBlocks = kDim / 8;
};

template <class C>
struct alignas(128) BackwardStorage {
  SplitFp16Tile<C::kBlockRows, C::kDim> x, y;                    // Q and dO, or K and V
  StreamStorage<C::kBlockColumns, C::kDim, C::kThreads> stream;  // K and V, or Q and dO
  float x_factor[C::kBlockRows], y_factor[C::kBlockRows];
  float2 statistics[2]
                   [C::kBlockColumns];  // of the raw tile, of the halves: lse in log2 units, delta
};

// What the host derives from the parameters, once.
struct BackwardFp32Plan {
  float2* statistics;  // [B0, B1, Hq, Sq]: lse in log2 units (+inf for a row without keys), delta
  uint32_t tiles;      // grid slots of one head
  int vector;          // rows of q, k, v, dout take 16-byte copies
  int vector_dq, vector_dk, vector_dv;
  int plain;    // scores are what is exponentiated, up to a positive factor
  float inner;  // factor of the scores: to units of log2 if plain, to natural ones or those of the
                // cap if not
  float cap;    // softcap or 0
  int write_bias;  // the kernel of the queries writes dbias
  int vector_dbias;
  BiasMaskAccess bias_mask;
};

// S becomes cap tanh(factor S), of factor 1 then; dS, given dP - delta, takes the slope.
template <int kM, int kN>
__device__ __forceinline__ void cap_scores(float (&s)[kM][kN][4], float (&dp)[kM][kN][4],
                                           float (&factor)[kM][2], float cap) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) {
    const int m = i / (4 * kN), n = i / 4 % kN, e = i % 4;
    float slope;
    s[m][n][e] = cap * tanh_accurate(factor[m][e / 2] * s[m][n][e], slope);
    dp[m][n][e] *= slope;
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

enum Rows { kQueries, kKeysBoth, kKeysK, kKeysV };  // what a CTA owns, and the gradients it makes

template <class C, int kWhat, bool kHasBiasMask>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    backward_fp32_kernel(const __grid_constant__ FlashsciBackwardParams p,
                         const __grid_constant__ BackwardFp32Plan plan) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<BackwardStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));
  constexpr bool kKeys = kWhat != kQueries;
  constexpr bool kX = kWhat != kKeysV;                        // dQ or dK
  constexpr bool kY = kWhat == kKeysBoth || kWhat == kKeysV;  // dV
  using RowTile = SplitFp16Tile<C::kBlockRows, C::kDim>;
  using ColumnTile = SplitFp16Tile<C::kBlockColumns, C::kDim>;

  // Which tile of which head.
  const uint32_t tiles = plan.tiles;
  const HeadCoord place(blockIdx.x, tiles, kKeys ? p.heads_k : p.heads_q, p.batch1);
  const uint32_t slot = blockIdx.x - place.batch_head * tiles;
  const uint32_t group = static_cast<uint32_t>(p.heads_q / p.heads_k);
  int tile, first_row, rows, first_column, columns;
  if (p.cu_seqlens_q != nullptr) {
    const TileOfSequence work = kKeys
                                    ? find_tile<C::kBlockRows>(slot, p.cu_seqlens_k, p.cu_seqlens_q,
                                                               p.num_seqs, p.seq_k, p.seq_q)
                                    : find_tile<C::kBlockRows>(slot, p.cu_seqlens_q, p.cu_seqlens_k,
                                                               p.num_seqs, p.seq_q, p.seq_k);
    tile = work.tile, first_row = work.first_q, rows = work.seq_q;
    first_column = work.first_k, columns = work.seq_k;
  } else {
    tile = static_cast<int>(!kKeys && p.window_right >= 0 ? tiles - 1 - slot : slot);
    first_row = first_column = 0;
    rows = kKeys ? p.seq_k : p.seq_q, columns = kKeys ? p.seq_q : p.seq_k;
  }
  const int tile_row = tile * C::kBlockRows;
  if (tile < 0 || tile_row >= rows) return;

  const int warp = ptx::redux_max(threadIdx.x / 32);
  const int lane = threadIdx.x % 32;
  const int warp_row = tile_row + warp * C::kRows;
  // Row r sees columns [begin(r), end(r)).
  Window window(p.window_left, p.window_right, p.lower_right != 0, kKeys ? columns : rows,
                kKeys ? rows : columns);
  if (kKeys) {
    const int before = window.before;
    window.before = 1 - window.after, window.after = 1 - before, window.seq_k = columns;
  }
  const int last_row = min(tile_row + C::kBlockRows, rows) - 1;
  const int columns_begin = window.begin(tile_row), columns_end = window.end(last_row);
  const int first_tile = columns_begin / C::kBlockColumns;
  const int end_tile = columns_begin < columns_end
                           ? (columns_end + C::kBlockColumns - 1) / C::kBlockColumns
                           : first_tile;
  const int warp_last_row = min(warp_row + C::kRows, rows) - 1;
  const int seen_begin = window.begin(warp_row);
  const int seen_end = warp_row < rows ? window.end(warp_last_row) : 0;
  const int full_begin = window.begin(warp_last_row), full_end = window.end(warp_row);

  // Tiles (head of the group, tile) in the order of the loop: all tiles of the last head first.
  Stream<C::kBlockColumns, C::kDim, C::kThreads> stream(shared.stream);
  const uint32_t row_head = kKeys ? place.head : place.head / group;  // of keys
  const auto load = [&](int head, int of_head) {
    const int first = of_head * C::kBlockColumns;
    const int left = columns - first;
    if (kKeys) {
      const uint32_t query_head = place.head * group + head;
      const int64_t from = first_column + first;
      stream.load(0,
                  static_cast<const float*>(p.q) + place.offset(p.q_strides, query_head) +
                      from * p.q_strides.row,
                  p.q_strides.row, left, p.head_dim, plan.vector != 0);
      stream.load(1,
                  static_cast<const float*>(p.dout) + place.offset(p.dout_strides, query_head) +
                      from * p.dout_strides.row,
                  p.dout_strides.row, p.dout != nullptr ? left : 0, p.head_dim_v, plan.vector != 0);
      const uint32_t batch = place.batch_head / static_cast<uint32_t>(p.heads_k);
      const float2* statistics =
          plan.statistics + (static_cast<int64_t>(batch) * p.heads_q + query_head) * p.seq_q + from;
      for (int i = threadIdx.x; i < C::kBlockColumns; i += C::kThreads)
        ptx::cp_async_small<8>(ptx::shared_address(&shared.statistics[0][i]), statistics + i,
                               i < left ? 8 : 0);
    } else {
      const int64_t from = first_column + first;
      stream.load(0,
                  static_cast<const float*>(p.k) + place.offset(p.k_strides, row_head) +
                      from * p.k_strides.row,
                  p.k_strides.row, left, p.head_dim, plan.vector != 0);
      stream.load(1,
                  static_cast<const float*>(p.v) + place.offset(p.v_strides, row_head) +
                      from * p.v_strides.row,
                  p.v_strides.row, left, p.head_dim_v, plan.vector != 0);
    }
  };

  const uint32_t x_start = start_of_a<RowTile>(ptx::shared_address(&shared.x), warp * C::kRows);
  const uint32_t y_start = start_of_a<RowTile>(ptx::shared_address(&shared.y), warp * C::kRows);
  const uint32_t x_rows = start_of_rows<ColumnTile>(stream.tile(0), true);
  const uint32_t x_rows_high = start_of_rows<ColumnTile>(stream.tile(0), false);
  const uint32_t x_dims = start_of_dims<ColumnTile>(stream.tile(0), true);
  const uint32_t x_dims_high = start_of_dims<ColumnTile>(stream.tile(0), false);
  constexpr int kTogether = C::kM * C::kDim >= 128 ? 2 : 4;  // registers
  constexpr int kToY = sizeof(ColumnTile);                   // from tile 0 of the stream to tile 1
  const bool three = p.precision == FLASHSCI_TF32X3;

  float dx[C::kM][kX ? C::kDimBlocks : 1][4];    // dQ or dK: [m16, n8 of D, fragment]
  float dy[C::kM][kY ? C::kDimBlocks : 1][4];    // dV: [m16, n8 of Dv, fragment]
  float x_factor[C::kM][2], y_factor[C::kM][2];  // of this lane's rows, with plan.inner in x's
  float2 statistics[C::kM][2];                   // of this lane's rows, if they are queries
  clear(dx);
  clear(dy);

  int head = kKeys ? static_cast<int>(group) - 1 : 0;
  const uint32_t first_head = kKeys ? place.head * group : place.head;  // of queries
  BiasMaskTile<kHasBiasMask ? C::kM : 1, kHasBiasMask ? C::kN : 2> pair_tile;
  const auto load_bias_mask = [&](int of_group, int column) {
    if constexpr (kHasBiasMask) {
      const BiasMaskOfHead<kKeys> bias_mask(p.bias_mask, plan.bias_mask, place,
                                            first_head + of_group, rows, columns);
      pair_tile.load(bias_mask, warp_row + lane / 4, column + lane % 4 * 4);
    }
  };
  if (first_tile < end_tile) {
    load_bias_mask(head, (end_tile - 1) * C::kBlockColumns);
    const uint32_t x_tile = ptx::shared_address(&shared.x), y_tile = ptx::shared_address(&shared.y);
    const int64_t from = first_row + tile_row;
    const FlashsciStrides& xs = kKeys ? p.k_strides : p.q_strides;
    const FlashsciStrides& ys = kKeys ? p.v_strides : p.dout_strides;
    load_raw<C::kBlockRows, C::kDim, C::kThreads, false>(
        x_tile,
        static_cast<const float*>(kKeys ? p.k : p.q) + place.offset(xs, place.head) + from * xs.row,
        xs.row, rows - tile_row, p.head_dim, plan.vector != 0);
    load_raw<C::kBlockRows, C::kDim, C::kThreads, false>(
        y_tile,
        static_cast<const float*>(kKeys ? p.v : p.dout) + place.offset(ys, place.head) +
            from * ys.row,
        ys.row, kKeys || p.dout != nullptr ? rows - tile_row : 0, p.head_dim_v, plan.vector != 0);
    ptx::cp_async_commit();
    load(head, end_tile - 1);
    ptx::cp_async_commit();
    if (!kKeys) {
      const float2* of_rows =
          plan.statistics + static_cast<int64_t>(place.batch_head) * p.seq_q + from;
#pragma unroll
      for (int i = 0; i < C::kM * 2; ++i) {
        const int row = warp * C::kRows + i * 8 + lane / 4;
        statistics[i / 2][i % 2] =
            tile_row + row < rows ? __ldg(of_rows + row) : make_float2(INFINITY, 0.f);
      }
    }
    ptx::cp_async_wait<1>();
    __syncthreads();
    convert_in_place<C::kBlockRows, C::kDim, C::kThreads>(x_tile, shared.x_factor);
    convert_in_place<C::kBlockRows, C::kDim, C::kThreads>(y_tile, shared.y_factor);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < C::kM * 2; ++i) {
      const int row = warp * C::kRows + i * 8 + lane / 4;
      x_factor[i / 2][i % 2] = shared.x_factor[row] * plan.inner;
      y_factor[i / 2][i % 2] = shared.y_factor[row];
    }
  } else {
    head = -1;
  }

  int of_head = end_tile - 1;  // tile
#pragma unroll 1
  while (head >= 0) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the raw tile has landed; nobody reads the halves of the last one any more
    if (kKeys) {
      for (int i = threadIdx.x; i < C::kBlockColumns; i += C::kThreads)
        shared.statistics[1][i] = shared.statistics[0][i];
    }
    stream.convert();
    const int first = of_head * C::kBlockColumns;
    const int this_head = head;
    if (!stream.again && --of_head < first_tile) {
      --head;
      of_head = end_tile - 1;
    }
    if (!stream.again && head >= 0) load(head, of_head);
    ptx::cp_async_commit();
    if (first < seen_end && first + C::kBlockColumns > seen_begin) {
      float s[C::kM][C::kN][4], dp[C::kM][C::kN][4];  // [m16, n8 of columns, fragment]
      multiply_rows<RowTile, ColumnTile, C::kDim>(s, opaque(x_start), opaque(x_rows),
                                                  opaque(x_rows_high), three);
      multiply_rows<RowTile, ColumnTile, C::kDim>(dp, opaque(y_start), opaque(x_rows) + kToY,
                                                  opaque(x_rows_high) + kToY, three);
      const auto statistics_of = [&](int m, int n, int e) {
        return kKeys ? shared.statistics[1][n / 2 * 16 + lane % 4 * 4 + n % 2 * 2 + e % 2]
                     : statistics[m][e / 2];
      };
      float factor[C::kM][2];  // from s to what is exponentiated
#pragma unroll
      for (int i = 0; i < C::kM * C::kN * 4; ++i) {
        const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
        dp[m][n][e] =
            fmaf(dp[m][n][e], y_factor[m][e / 2] * stream.factor(1), -statistics_of(m, n, e).y);
      }
#pragma unroll
      for (int i = 0; i < C::kM * 2; ++i)
        factor[i / 2][i % 2] = x_factor[i / 2][i % 2] * stream.factor(0);
      if (plan.plain) {
        keep_finite(factor);
      } else {
        if (plan.cap != 0.f) cap_scores(s, dp, factor, plan.cap);
        if constexpr (kHasBiasMask) {
          const BiasMaskOfHead<kKeys> bias_mask(p.bias_mask, plan.bias_mask, place,
                                                first_head + this_head, rows, columns);
          pair_tile.apply(s, bias_mask, factor);
        } else {
          scale_rows(s, factor);
        }
        set_all(factor, kLog2e);
      }
      if (stream.hide) hide_columns(s, stream.shared.state, lane % 4 * 4);
      if (first < full_begin || first + C::kBlockColumns > full_end)
        mask_interleaved(s, window, warp_row + lane / 4, first + lane % 4 * 4);
      if (kHasBiasMask && head >= 0) load_bias_mask(head, of_head * C::kBlockColumns);
      bool large = false;
      if constexpr (kKeys) {
#pragma unroll
        for (int i = lane; i < C::kBlockColumns; i += 32)
          large |= is_large(shared.statistics[1][i].x);
        large = __any_sync(0xffffffffu, large);
      } else {
        large = any_large(statistics);
      }
      const auto exponentiate = [&](float most) {  // P, no more than that
#pragma unroll
        for (int i = 0; i < C::kM * C::kN * 4; ++i) {
          const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
          const float x =
              ptx::ex2_approx(fmaf(s[m][n][e], factor[m][e / 2], -statistics_of(m, n, e).x));
          s[m][n][e] = most == INFINITY ? x : fminf(x, most);
          dp[m][n][e] *= s[m][n][e];
        }
      };
      // Beside the products of wide heads the limit is nothing, and a branch costs registers.
      if (C::kDim >= 128 || large)
        exponentiate(1.f);
      else
        exponentiate(INFINITY);
      if (!kKeys && kHasBiasMask && plan.write_bias)
        store_bias_gradient(dp,
                            static_cast<float*>(p.dbias) +
                                BiasMaskOfHead<>::offset(p.dbias_strides, place, place.head),
                            p.dbias_strides, warp_row + lane / 4, first + lane % 4 * 4, rows,
                            columns, plan.vector_dbias != 0,
                            stream.hide ? stream.shared.state + lane % 4 * 4 : nullptr);
      Operand<C::kM, C::kN> operand;
      if constexpr (kY) {
        if (p.dv != nullptr) {
          drop_zero_rows(s, stream.shared.state, lane % 4 * 4, 1);
          normalise(s, factor);
#pragma unroll
          for (int i = 0; i < C::kM * 2; ++i) factor[i / 2][i % 2] *= stream.factor(1);
          operand.take(s, three);
          multiply_dims<ColumnTile, C::kDim, kTogether>(dy, operand, opaque(x_dims) + kToY,
                                                        opaque(x_dims_high) + kToY, factor, three);
        }
      }
      if constexpr (kX) {
        if ((kKeys ? p.dk : p.dq) != nullptr) {
          drop_zero_rows(dp, stream.shared.state, lane % 4 * 4, 0);
          normalise(dp, factor);
#pragma unroll
          for (int i = 0; i < C::kM * 2; ++i) factor[i / 2][i % 2] *= stream.factor(0);
          operand.take(dp, three);
          multiply_dims<ColumnTile, C::kDim, kTogether>(dx, operand, opaque(x_dims),
                                                        opaque(x_dims_high), factor, three);
        }
      }
    } else if (kHasBiasMask && head >= 0) {
      load_bias_mask(head, of_head * C::kBlockColumns);
    }
  }

  if (warp_row >= rows) return;
  const int64_t row = first_row + warp_row;
  float factor[C::kM][2];
  if constexpr (kX) {
    void* const to = kKeys ? p.dk : p.dq;
    const FlashsciStrides& strides = kKeys ? p.dk_strides : p.dq_strides;
    set_all(factor, p.scale);
    if (to != nullptr)
      store_rows_fp32(
          dx, factor,
          static_cast<float*>(to) + place.offset(strides, place.head) + row * strides.row,
          strides.row, rows - warp_row, p.head_dim, (kKeys ? plan.vector_dk : plan.vector_dq) != 0);
  }
  if constexpr (kY) {
    set_all(factor, 1.f);
    if (p.dv != nullptr)
      store_rows_fp32(dy, factor,
                      static_cast<float*>(p.dv) + place.offset(p.dv_strides, place.head) +
                          row * p.dv_strides.row,
                      p.dv_strides.row, rows - warp_row, p.head_dim_v, plan.vector_dv != 0);
  }
}

// lse in log2 units (+inf where there is no key: P is 0 then) and delta of every query.
__global__ void __launch_bounds__(256, 4)
    statistics_fp32_kernel(const __grid_constant__ FlashsciBackwardParams p, float2* statistics,
                           uint32_t tiles, int lanes, int vector) {
  const HeadCoord place(blockIdx.x, tiles, p.heads_q, p.batch1);
  const uint32_t tile = blockIdx.x - place.batch_head * tiles;
  const int64_t row = static_cast<int64_t>(tile) * (256 / lanes) + threadIdx.x / lanes;
  float sum = 0.f;
  if (row < p.seq_q && p.dout != nullptr) {
    const float* dout = static_cast<const float*>(p.dout) +
                        place.offset(p.dout_strides, place.head) + row * p.dout_strides.row;
    const float* out = static_cast<const float*>(p.out) + place.offset(p.out_strides, place.head) +
                       row * p.out_strides.row;
    if (vector) {
      for (int d = threadIdx.x % lanes * 4; d < p.head_dim_v; d += lanes * 4) {
        const float4 a = __ldg(reinterpret_cast<const float4*>(dout + d));
        const float4 b = __ldg(reinterpret_cast<const float4*>(out + d));
        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
      }
    } else {
      for (int d = threadIdx.x % lanes; d < p.head_dim_v; d += lanes)
        sum = fmaf(__ldg(dout + d), __ldg(out + d), sum);
    }
  }
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (row >= p.seq_q || threadIdx.x % lanes != 0) return;
  const int64_t at = static_cast<int64_t>(place.batch_head) * p.seq_q + row;
  if (p.dlse != nullptr)
    sum -= p.dlse[place.offset(p.dlse_strides, place.head) + row * p.dlse_strides.row];
  const float lse = p.lse[at];
  statistics[at] =
      lse == -INFINITY ? make_float2(INFINITY, 0.f) : make_float2(lse_of_backward(lse), sum);
}

}  // namespace flashsci::sm80::bwd_fp32
