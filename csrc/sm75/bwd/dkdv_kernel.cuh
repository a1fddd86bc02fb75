// dk and dv for Turing: fp16, mma.m16n8k8, no cp.async, 64 KiB of shared memory an SM.
//
// Maths     P = exp(S - lse), dP = dO V^T, dS = P (dP - delta) [times the softcap's slope],
//           dV = P^T dO, dK = scale dS^T Q; delta = rowsum(dO O) - dlse.
// Roles     One CTA per (key tile, key head, batch), all on grid.x; it goes through the query heads
//           of its key head and the query tiles that see its keys, so dK and dV have one owner. All
//           products are transposed, rows are keys: P^T and dS^T leave their product as left
//           operands of the next. kWarps warps own kBlockK / kWarps keys each, whose K, V, dK and
//           dV stay in registers; they share the tiles of Q and dO.
// Shared    Two stages of Q, dO and row statistics, half of V where D is 128: `KeyStorage`. K and V
//           before the loop, dV and dK after it pass through the same bytes.
// Pipeline  Global memory -> registers -> shared memory: Q_n+1 is fetched during the first half of
//           the queries of tile n and stored behind it, dO_n+1 likewise during the second half,
//           into the stage that nobody reads; one barrier a tile.
// Limits    Shared-memory reads: 16 keys a warp read as long as they multiply
//           (docs/kernels/sm75.md), and registers: what is not needed in the products is kept in
//           shared memory (`KeyWork`) or found again.
#pragma once
#include "../../core/bias_mask.cuh"
#include "../../core/mask.cuh"
#include "../../core/poison.cuh"
#include "../../core/register_tile.cuh"
#include "../../core/row_statistics.cuh"
#include "../../core/store_rows.cuh"
#include "../../core/varlen.cuh"
#include "../../core/warp_mma.cuh"
#include "config.cuh"

namespace flashsci::sm75::bwd {

template <int kHeadDim_, int kBlockK_, int kBlockQ_, int kSteps_, int kWarps_, int kMinBlocks_>
struct KeyTiling {
  static constexpr int kHeadDim = kHeadDim_, kBlockK = kBlockK_, kBlockQ = kBlockQ_;
  static constexpr int kWarps = kWarps_, kMinBlocks = kMinBlocks_, kThreads = 32 * kWarps;
  static constexpr int kKeys = kBlockK / kWarps, kM = kKeys / 16;                   // of a warp
  static constexpr int kSteps = kSteps_, kStep = kBlockQ / kSteps, kN = kStep / 8;  // queries
  static constexpr int kDimBlocks = kHeadDim / 8;
  // Registers hold the fragments of these columns of V, and all of K; a tile in shared memory the
  // rest of V.
  static constexpr int kHeldV = kHeadDim <= 96 ? kHeadDim : kHeadDim / 2;
  static constexpr int kRestV = kHeadDim - kHeldV;
  static_assert(kKeys % 16 == 0 && kStep % 16 == 0 && kBlockQ <= kThreads, "whole mma tiles");
  static_assert(kSteps == 1 || kSteps == 2, "two loads for each tile");
};

template <class C>
struct alignas(128) KeyStorage {
  static constexpr int kStaged = 2 * 2 * C::kBlockQ;  // [stage, Q or dO, kBlockQ]
  static constexpr int kRows = kStaged > C::kBlockK ? kStaged : C::kBlockK;
  uint16_t tiles[kRows * C::kHeadDim];                     // [kRows, kHeadDim]
  uint16_t v[C::kRestV > 0 ? C::kBlockK * C::kRestV : 8];  // [kBlockK, kRestV]
  float2 statistics[2][C::kBlockQ];                        // [stage, kBlockQ]: -lse, -delta
  int4 work[2];  // KeyWork: no registers are left to keep it in
};

// What one CTA works on.
struct KeyWork {
  int first_key, keys, first_query, queries;  // rows of the sequence
  // Query tiles that see any of its keys: of every query head of the group, `tiles` from `first`
  // on. Tile n of the loop, n < total, is one of head n / tiles.
  int first, tiles, total, unused;
};

// Queries [first_query, end_query) of seq_q that see key j < seq_k; empty if first >= end.
__device__ __forceinline__ int first_query(const Window& window, int j) {
  return max(j - window.after + 1, 0);
}
__device__ __forceinline__ int end_query(const Window& window, int j, int seq_q) {
  return min(j - window.before, seq_q - 1) + 1;
}

// mask_scores where rows are keys: s^T. row: this lane's first key; column: the query of its first
// score.
template <int kM, int kN>
__device__ __forceinline__ void mask_scores_transposed(float (&s)[kM][kN][4], const Window& window,
                                                       int row, int column) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = row + m * 16 + half * 8;
      const int begin = j < window.seq_k ? first_query(window, j) - column : 1 << 30;
      const int last = j - window.before - column;  // <= 2^31 - 1
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = n * 8 + e;
          if (i < begin || i > last) s[m][n][half * 2 + e] = -INFINITY;
        }
      }
    }
  }
}

// A tile of rows on its way, whatever the rows are aligned to. kAny: the plan says.
template <bool kAny, class Moving>
__device__ __forceinline__ void fetch_rows(Moving& moving, const void* data, int64_t offset,
                                           const FlashsciStrides& strides, int row, int rows_valid,
                                           int columns, int copy_bytes, bool vector) {
  const auto* rows = static_cast<const uint16_t*>(data) + offset + row * strides.row;
  if (!kAny || vector)
    moving.template fetch<true>(rows, strides.row, rows_valid, columns, copy_bytes);
  else
    moving.template fetch<false>(rows, strides.row, rows_valid, columns, copy_bytes);
}

// kAny: with bias or mask, or rows of any alignment.
template <class Op, class C, bool kAny>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    backward_keys_kernel(const __grid_constant__ FlashsciBackwardParams p,
                         const __grid_constant__ BackwardPlan plan, uint32_t tiles) {
  using T = Tile<C::kHeadDim>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<KeyStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));

  // Which key tile of which key head; in what find_tile gives, keys are queries and queries keys.
  const TileCoord place(blockIdx.x, tiles, p.heads_k, p);
  TileOfSequence work;
  if (p.cu_seqlens_q != nullptr) {
    work = find_tile<C::kBlockK>(place.tile, p.cu_seqlens_k, p.cu_seqlens_q, p.num_seqs, p.seq_k,
                                 p.seq_q);
  } else {
    work = {static_cast<int>(place.tile), 0, p.seq_k, 0, p.seq_q};
  }
  const int tile_key = work.tile * C::kBlockK;
  if (work.tile < 0 || tile_key >= work.seq_q) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_key = tile_key + warp * C::kKeys;
  {
    const int keys = work.seq_q, queries = work.seq_k;
    const Window window(p.window_left, p.window_right, p.lower_right != 0, queries, keys);
    const int begin = first_query(window, tile_key);
    const int end = end_query(window, min(tile_key + C::kBlockK, keys) - 1, queries);
    const int first = begin / C::kBlockQ;
    const int count = begin < end ? (end + C::kBlockQ - 1) / C::kBlockQ - first : 0;
    if (threadIdx.x == 0) {
      shared.work[0] = make_int4(work.first_q, keys, work.first_k, queries);
      shared.work[1] = make_int4(first, count, count * (p.heads_q / p.heads_k), 0);
    }
  }
  __syncthreads();
  const auto load_work = [&] {
    const uint32_t at = ptx::shared_address(shared.work);
    const uint4 a = ptx::ld_shared_v4(at), b = ptx::ld_shared_v4(at + 16);
    return KeyWork{int(a.x), int(a.y), int(a.z), int(a.w), int(b.x), int(b.y), int(b.z), int(b.w)};
  };

  constexpr int kTileBytes = C::kBlockQ * T::kRowBytes;
  const uint32_t storage = ptx::shared_address(shared.tiles);
  const uint32_t statistics = ptx::shared_address(shared.statistics);
  const uint32_t warp_tile = storage + warp * C::kKeys * T::kRowBytes;  // K, V, dV, dK
  uint32_t k[C::kM][C::kHeadDim / 16][4];                               // [m16, k16 of D, fragment]
  uint32_t v[C::kM][C::kHeldV / 16][4];  // [m16, k16 of Dv, fragment]
  float dk[C::kM][C::kDimBlocks][4];     // [m16, n8 of D, fragment]
  float dv[C::kM][C::kDimBlocks][4];     // [m16, n8 of Dv, fragment]
  set_zero(dk);
  set_zero(dv);

  TileRegisters<C::kBlockQ, C::kHeadDim, C::kThreads> moving;  // a Q or dO tile
  float2 moving_statistics;                                    // of row threadIdx.x of it
  // what = 0: Q and the statistics, 1: dO.
  const auto fetch = [&](int what, int n) {
    const TileCoord here(opaque(blockIdx.x), tiles, p.heads_k, p);  // found, not kept
    const KeyWork work = load_work();
    const int member = n / work.tiles;
    const uint32_t head = here.head * (p.heads_q / p.heads_k) + member;
    const int row = (work.first + n - member * work.tiles) * C::kBlockQ;
    const int left = work.queries - row;
    const FlashsciStrides& strides = what == 0 ? p.q_strides : p.dout_strides;
    fetch_rows<kAny>(moving, what == 0 ? p.q : p.dout, here.offset(strides, head), strides,
                     work.first_query + row, what == 0 || p.dout != nullptr ? left : 0,
                     what == 0 ? p.head_dim : p.head_dim_v, p.copy_bytes, plan.vector);
    if (what != 0) return;
    // A row that is not there has no probability, whatever its scores.
    moving_statistics = make_float2(-INFINITY, 0.f);
    if (static_cast<int>(threadIdx.x) < min(C::kBlockQ, left))
      moving_statistics =
          __ldg(plan.statistics + (static_cast<int64_t>(here.batch) * p.heads_q + head) * p.seq_q +
                work.first_query + row + threadIdx.x);
  };
  const auto store = [&](int what, int stage) {
    moving.store(storage + (stage * 2 + what) * kTileBytes);
    if (what == 0 && threadIdx.x < C::kBlockQ)
      shared.statistics[stage][threadIdx.x] = moving_statistics;
  };

  if (load_work().total > 0) {
    const int row = work.first_q + tile_key, left = work.seq_q - tile_key;
    TileRegisters<C::kBlockK, C::kHeadDim, C::kThreads> rows;
    fetch_rows<kAny>(rows, p.k, place.offset(p.k_strides, place.head), p.k_strides, row, left,
                     p.head_dim, p.copy_bytes, plan.vector);
    rows.store(storage);
    fetch_rows<kAny>(rows, p.v, place.offset(p.v_strides, place.head), p.v_strides, row, left,
                     p.head_dim_v, p.copy_bytes, plan.vector);
    __syncthreads();
    load_rows<C::kHeadDim>(k, warp_tile + row_fragment<C::kHeadDim>(lane));
    __syncthreads();
    rows.store(storage);
    fetch(0, 0);
    __syncthreads();
    load_rows<C::kHeadDim>(v, warp_tile + row_fragment<C::kHeadDim>(lane));
    __syncthreads();
    store(0, 0);
    fetch(1, 0);
    if constexpr (C::kRestV > 0) {
      TileRegisters<C::kBlockK, C::kRestV, C::kThreads> rest;
      fetch_rows<kAny>(rest, p.v, place.offset(p.v_strides, place.head) + C::kHeldV, p.v_strides,
                       row, left, p.head_dim_v - C::kHeldV, p.copy_bytes, plan.vector);
      rest.store(ptx::shared_address(shared.v));
    }
    store(1, 0);
  }
  uint32_t v_rest = 0;
  if constexpr (C::kRestV > 0)
    v_rest = ptx::shared_address(shared.v) + warp * C::kKeys * Tile<C::kRestV>::kRowBytes +
             row_fragment<C::kRestV>(lane);

#pragma unroll 1
  for (int n = 0; n < load_work().total; ++n) {
    __syncthreads();  // Q_n and dO_n are there; nobody reads the other stage any more
    const int stage = n % 2;
#pragma unroll 1
    for (int part = 0; part < C::kSteps; ++part) {
      const bool more = n + 1 < load_work().total;
      if (more) fetch(part, n + 1);
      // Some of these queries see some of this warp's keys; all see all.
      const KeyWork work = load_work();
      const Window window(p.window_left, p.window_right, p.lower_right != 0, work.queries,
                          work.keys);
      const int step = part * C::kStep;
      const int query = (work.first + n % work.tiles) * C::kBlockQ + step;
      const int last_query = min(query + C::kStep, work.queries) - 1;
      const int last_key = min(warp_key + C::kKeys, work.keys) - 1;
      const bool active = query < work.queries && window.begin(query) <= last_key &&
                          window.end(last_query) > warp_key;
      const bool full =
          window.begin(last_query) <= warp_key && window.end(query) >= warp_key + C::kKeys;
      float s[C::kM][C::kN][4];   // S^T, then P^T: [m16 of keys, n8 of queries, fragment]
      float dp[C::kM][C::kN][4];  // dP^T - delta, then dS^T
      const uint32_t q_rows = storage + stage * 2 * kTileBytes + step * T::kRowBytes;
      const uint32_t dout_rows = q_rows + kTileBytes;
      const uint32_t pair = statistics + (stage * C::kBlockQ + step + lane % 4 * 2) * 8;
      if (active) {
        set_zero(s);
        multiply_transposed<Op, C::kHeadDim>(s, k, q_rows + column_fragment<C::kHeadDim>(lane));
#pragma unroll
        for (int j = 0; j < C::kN; ++j) {
          const float4 x = load_statistics(pair + j * 64);
#pragma unroll
          for (int i = 0; i < C::kM * 4; ++i) dp[i / 4][j][i % 4] = i % 2 == 0 ? x.y : x.w;
        }
        multiply_transposed<Op, C::kHeadDim>(dp, v, dout_rows + column_fragment<C::kHeadDim>(lane),
                                             v_rest);
      }
      if (C::kSteps == 1 && more) {
        store(0, stage ^ 1);
        fetch(1, n + 1);
      }
      if (active) {
        if (plan.score_mode != kScaled) shape_scores(s, dp, plan);
        const int key = warp_key + lane / 4, column = query + lane % 4 * 2;
        if constexpr (kAny) {
          const TileCoord here(opaque(blockIdx.x), tiles, p.heads_k, p);
          const uint32_t head = here.head * (p.heads_q / p.heads_k) + n / work.tiles;
          apply_bias_mask<Op, true>(s, BiasMaskView(p.bias_mask, here.batch0, here.batch1, head),
                                    key, column, work.queries, work.keys, plan.bias_factor);
        }
        if (!full) mask_scores_transposed(s, window, key, column);
#pragma unroll
        for (int j = 0; j < C::kN; ++j) {
          const float4 x = load_statistics(pair + j * 64);
#pragma unroll
          for (int i = 0; i < C::kM * 4; ++i) {
            const int m = i / 4, e = i % 4;
            s[m][j][e] = ptx::ex2_approx(fmaf(s[m][j][e], plan.exp_scale, e % 2 == 0 ? x.x : x.z));
          }
        }
        if (any_large_column<C::kN>(pair)) limit_probabilities(s);
#pragma unroll
        for (int i = 0; i < C::kM * C::kN * 4; ++i)
          dp[i / (4 * C::kN)][i / 4 % C::kN][i % 4] *= s[i / (4 * C::kN)][i / 4 % C::kN][i % 4];
        uint32_t p16[C::kN / 2][C::kM][4], ds16[C::kN / 2][C::kM][4];
#pragma unroll
        for (int j = 0; j < C::kN / 2; ++j) {
          pack<Op>(p16[j], s, j);
          pack<Op>(ds16[j], dp, j);
        }
#pragma unroll
        for (int j = 0; j < C::kN / 2; ++j) {
          const uint32_t rows = j * 16 * T::kRowBytes + row_fragment<C::kHeadDim>(lane);
          multiply_16<Op, C::kHeadDim>(dv, p16[j], dout_rows + rows);
          multiply_16<Op, C::kHeadDim>(dk, ds16[j], q_rows + rows);
        }
      }
      if (more) store(C::kSteps == 1 ? 1 : part, stage ^ 1);
    }
  }

  __syncthreads();  // the stages are free for dV and dK
  const int rows = load_work().keys - warp_key;
  const int64_t row = load_work().first_key + warp_key;
  const TileCoord home(opaque(blockIdx.x), tiles, p.heads_k, p);  // found again, not kept
  if (p.dv != nullptr)
    store_rows<Op, C::kHeadDim>(dv, 1.f, warp_tile,
                                static_cast<uint16_t*>(p.dv) +
                                    home.offset(p.dv_strides, home.head) + row * p.dv_strides.row,
                                p.dv_strides.row, rows, p.head_dim_v, plan.vector_dv != 0);
  if (p.dk != nullptr)
    store_rows<Op, C::kHeadDim>(dk, p.scale, warp_tile,
                                static_cast<uint16_t*>(p.dk) +
                                    home.offset(p.dk_strides, home.head) + row * p.dk_strides.row,
                                p.dk_strides.row, rows, p.head_dim, plan.vector_dk != 0);
}

}  // namespace flashsci::sm75::bwd
