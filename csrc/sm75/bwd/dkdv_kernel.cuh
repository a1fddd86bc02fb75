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
//           the queries of tile n and stored after it, dO_n+1 likewise during the second half, into
//           the stage that no warp reads; one barrier a tile.
// Limits    Shared-memory reads: 16 keys a warp take as long to read as to multiply
//           (docs/develop/kernels/sm75.md), and registers: data that the products do not need is
//           kept in shared memory (`KeyWork`) or recomputed.
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
  static constexpr int kKeys = kBlockK / kWarps, kM = kKeys / 16;                   // per warp
  static constexpr int kSteps = kSteps_, kStep = kBlockQ / kSteps, kN = kStep / 8;  // queries
  static constexpr int kDimBlocks = kHeadDim / 8;
  // Registers hold all of K and these columns of V; a tile in shared memory holds the rest of V.
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
  int4 work[2];                                            // KeyWork: no registers are left for it
};

// The work of one CTA.
struct KeyWork {
  int first_key, keys, first_query, queries;  // rows of the sequence
  // Query tiles that see any of its keys: for every query head of the group, `tiles` from `first`
  // on. Tile n of the loop, n < total, belongs to head n / tiles.
  int first, tiles, total, unused;
};

// Queries [first_query, end_query) of seq_q that see key j < seq_k; none if first >= end.
__device__ __forceinline__ int first_query(const Window& window, int j) {
  return max(j - window.after + 1, 0);
}
__device__ __forceinline__ int end_query(const Window& window, int j, int seq_q) {
  return min(j - window.before, seq_q - 1) + 1;
}

// mask_scores for rows that are keys: s^T. row: this lane's first key; column: the query of its
// first score.
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

// A tile of rows in flight, for any alignment of the rows. kAny: the plan has the alignment.
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

// The work of a warp: its place, and the steps of the loop over query tiles; fragments are locals,
// as in the forward. kAny: with bias or mask, or rows of any alignment.
template <class Op, class C, bool kAny>
struct KeyWarp {
  using T = Tile<C::kHeadDim>;
  using K = uint32_t[C::kM][C::kHeadDim / 16][4];  // [m16, k16 of D, fragment]
  using V = uint32_t[C::kM][C::kHeldV / 16][4];    // [m16, k16 of Dv, fragment]
  using Sums = float[C::kM][C::kDimBlocks][4];     // dK or dV: [m16, n8 of D, fragment]
  using Scores = float[C::kM][C::kN][4];           // [m16 of keys, n8 of queries, fragment]
  static constexpr int kTileBytes = C::kBlockQ * T::kRowBytes;
  enum { kQ, kDout };                                                  // tensors to fetch and store
  using Moving = TileRegisters<C::kBlockQ, C::kHeadDim, C::kThreads>;  // a Q or dO tile

  const FlashsciBackwardParams& p;
  const BackwardPlan& plan;
  const uint32_t tiles;
  const int warp_key, lane;  // the warp's first key in the sequence
  KeyStorage<C>& shared;
  const uint32_t storage, statistics;
  const uint32_t warp_tile;  // K, V, dV, dK

  __device__ __forceinline__ KeyWarp(const FlashsciBackwardParams& p_, const BackwardPlan& plan_,
                                     uint32_t tiles_, int tile_key, KeyStorage<C>& shared_)
      : p(p_),
        plan(plan_),
        tiles(tiles_),
        warp_key(tile_key + static_cast<int>(threadIdx.x / 32) * C::kKeys),
        lane(threadIdx.x % 32),
        shared(shared_),
        storage(ptx::shared_address(shared.tiles)),
        statistics(ptx::shared_address(shared.statistics)),
        warp_tile(storage + static_cast<int>(threadIdx.x / 32) * C::kKeys * T::kRowBytes) {}

  // --- recomputed, not kept

  __device__ __forceinline__ KeyWork load_work() const {
    const uint32_t at = ptx::shared_address(shared.work);
    const uint4 a = ptx::ld_shared_v4(at), b = ptx::ld_shared_v4(at + 16);
    return KeyWork{int(a.x), int(a.y), int(a.z), int(a.w), int(b.x), int(b.y), int(b.z), int(b.w)};
  }
  __device__ __forceinline__ TileCoord find_place() const {
    return TileCoord(opaque(blockIdx.x), tiles, p.heads_k, p);
  }

  // --- loads

  // Q and its statistics, or dO, of query tile n.
  __device__ __forceinline__ void fetch(Moving& moving, float2& moving_statistics, int what,
                                        int n) const {
    const TileCoord here = find_place();
    const KeyWork work = load_work();
    const int member = n / work.tiles;
    const uint32_t head = here.head * (p.heads_q / p.heads_k) + member;
    const int row = (work.first + n - member * work.tiles) * C::kBlockQ;
    const int left = work.queries - row;
    const FlashsciStrides& strides = what == kQ ? p.q_strides : p.dout_strides;
    fetch_rows<kAny>(moving, what == kQ ? p.q : p.dout, here.offset(strides, head), strides,
                     work.first_query + row, what == kQ || p.dout != nullptr ? left : 0,
                     what == kQ ? p.head_dim : p.head_dim_v, p.copy_bytes, plan.vector);
    if (what != kQ) return;
    // A row past the last has no probability, for any scores.
    moving_statistics = make_float2(-INFINITY, 0.f);
    if (static_cast<int>(threadIdx.x) < min(C::kBlockQ, left))
      moving_statistics =
          __ldg(plan.statistics + (static_cast<int64_t>(here.batch) * p.heads_q + head) * p.seq_q +
                work.first_query + row + threadIdx.x);
  }
  __device__ __forceinline__ void store(const Moving& moving, const float2& moving_statistics,
                                        int what, int stage) const {
    moving.store(storage + (stage * 2 + what) * kTileBytes);
    if (what == kQ && threadIdx.x < C::kBlockQ)
      shared.statistics[stage][threadIdx.x] = moving_statistics;
  }
  // K and V into registers through the stages, and the first query tile into the first stage.
  __device__ __forceinline__ void load_keys_and_first_tile(K& k, V& v, Moving& moving,
                                                           float2& moving_statistics,
                                                           const TileCoord& place,
                                                           const TileOfSequence& tile) const {
    const int tile_key = tile.tile * C::kBlockK;
    const int row = tile.first_q + tile_key, left = tile.seq_q - tile_key;
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
    fetch(moving, moving_statistics, kQ, 0);
    __syncthreads();
    load_rows<C::kHeadDim>(v, warp_tile + row_fragment<C::kHeadDim>(lane));
    __syncthreads();
    store(moving, moving_statistics, kQ, 0);
    fetch(moving, moving_statistics, kDout, 0);
    if constexpr (C::kRestV > 0) {
      TileRegisters<C::kBlockK, C::kRestV, C::kThreads> rest;
      fetch_rows<kAny>(rest, p.v, place.offset(p.v_strides, place.head) + C::kHeldV, p.v_strides,
                       row, left, p.head_dim_v - C::kHeldV, p.copy_bytes, plan.vector);
      rest.store(ptx::shared_address(shared.v));
    }
    store(moving, moving_statistics, kDout, 0);
  }
  // The address of this lane's part of the rest of V.
  __device__ __forceinline__ uint32_t rest_of_v() const {
    if constexpr (C::kRestV > 0)
      return ptx::shared_address(shared.v) +
             static_cast<int>(threadIdx.x / 32) * C::kKeys * Tile<C::kRestV>::kRowBytes +
             row_fragment<C::kRestV>(lane);
    return 0;
  }

  // --- products

  // kStep queries of a tile, from its query `first` on, and the last of this warp's keys.
  struct Step {
    const KeyWork work;
    const Window window;
    const int query, last_query, last_key;

    __device__ __forceinline__ Step(const KeyWarp& warp, int n, int first)
        : work(warp.load_work()),
          window(warp.p.window_left, warp.p.window_right, warp.p.lower_right != 0, work.queries,
                 work.keys),
          query((work.first + n % work.tiles) * C::kBlockQ + first),
          last_query(min(query + C::kStep, work.queries) - 1),
          last_key(min(warp.warp_key + C::kKeys, work.keys) - 1) {}
  };

  // pair: this lane's first two queries, in the statistics.
  __device__ __forceinline__ void start_from_delta(Scores& dp, uint32_t pair) const {
#pragma unroll
    for (int j = 0; j < C::kN; ++j) {
      const float4 x = load_statistics(pair + j * 64);
#pragma unroll
      for (int i = 0; i < C::kM * 4; ++i) dp[i / 4][j][i % 4] = i % 2 == 0 ? x.y : x.w;
    }
  }
  __device__ __forceinline__ void exponentiate(Scores& s, uint32_t pair) const {
#pragma unroll
    for (int j = 0; j < C::kN; ++j) {
      const float4 x = load_statistics(pair + j * 64);
#pragma unroll
      for (int i = 0; i < C::kM * 4; ++i) {
        const int m = i / 4, e = i % 4;
        s[m][j][e] =
            ptx::ex2_approx(fmaf(s[m][j][e], plan.scores.exp_scale, e % 2 == 0 ? x.x : x.z));
      }
    }
    if (any_large_column<C::kN>(pair)) limit_probabilities(s);
  }
  // S^T becomes P^T, dP^T - delta becomes dS^T.
  __device__ __forceinline__ void find_ds(Scores& s, Scores& dp, const Step& x, bool full, int n,
                                          uint32_t pair) const {
    if (plan.scores.mode != kScaled) modify_scores(s, dp, plan.scores);
    const int key = warp_key + lane / 4, column = x.query + lane % 4 * 2;
    if constexpr (kAny) {
      const TileCoord here = find_place();
      const uint32_t head = here.head * (p.heads_q / p.heads_k) + n / x.work.tiles;
      apply_bias_mask<Op, true>(s, BiasMaskView(p.bias_mask, here.batch0, here.batch1, head), key,
                                column, x.work.queries, x.work.keys, plan.bias_factor);
    }
    if (!full) mask_scores_transposed(s, x.window, key, column);
    exponentiate(s, pair);
    multiply_by_p(dp, s);
  }
  // dV += P^T dO, dK += dS^T Q
  __device__ __forceinline__ void add_products(Sums& dk, Sums& dv, const Scores& s,
                                               const Scores& ds, uint32_t q_rows,
                                               uint32_t dout_rows) const {
    uint32_t p16[C::kN / 2][C::kM][4], ds16[C::kN / 2][C::kM][4];
#pragma unroll
    for (int j = 0; j < C::kN / 2; ++j) {
      pack<Op>(p16[j], s, j);
      pack<Op>(ds16[j], ds, j);
    }
#pragma unroll
    for (int j = 0; j < C::kN / 2; ++j) {
      const uint32_t rows = j * 16 * T::kRowBytes + row_fragment<C::kHeadDim>(lane);
      multiply_16<Op, C::kHeadDim>(dv, p16[j], dout_rows + rows);
      multiply_16<Op, C::kHeadDim>(dk, ds16[j], q_rows + rows);
    }
  }

  __device__ __forceinline__ void write(Sums& dk, Sums& dv) const {
    const int rows = load_work().keys - warp_key;
    const int64_t row = load_work().first_key + warp_key;
    const TileCoord home = find_place();
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

  __device__ __forceinline__ void run(const TileCoord& place, const TileOfSequence& tile) const {
    K k;
    V v;
    Sums dk, dv;
    Moving moving;
    float2 moving_statistics;  // of row threadIdx.x of the tile in flight
    set_zero(dk);
    set_zero(dv);
    if (load_work().total > 0)
      load_keys_and_first_tile(k, v, moving, moving_statistics, place, tile);
    const uint32_t v_rest = rest_of_v();
#pragma unroll 1
    for (int n = 0; n < load_work().total; ++n) {
      __syncthreads();  // Q_n and dO_n are stored; no warp still reads the other stage
      const int stage = n % 2;
#pragma unroll 1
      for (int part = 0; part < C::kSteps; ++part) {
        const bool more = n + 1 < load_work().total;
        if (more) fetch(moving, moving_statistics, part, n + 1);
        const int first = part * C::kStep;
        const Step x(*this, n, first);
        // Whether some of these queries see some of this warp's keys; whether all see all.
        const bool active = x.query < x.work.queries && x.window.begin(x.query) <= x.last_key &&
                            x.window.end(x.last_query) > warp_key;
        const bool full = x.window.begin(x.last_query) <= warp_key &&
                          x.window.end(x.query) >= warp_key + C::kKeys;
        const uint32_t q_rows = storage + stage * 2 * kTileBytes + first * T::kRowBytes;
        const uint32_t dout_rows = q_rows + kTileBytes;
        const uint32_t pair = statistics + (stage * C::kBlockQ + first + lane % 4 * 2) * 8;
        Scores s, dp;
        if (active) {
          set_zero(s);
          multiply_transposed<Op, C::kHeadDim>(s, k, q_rows + column_fragment<C::kHeadDim>(lane));
          start_from_delta(dp, pair);
          multiply_transposed<Op, C::kHeadDim>(
              dp, v, dout_rows + column_fragment<C::kHeadDim>(lane), v_rest);
        }
        if (C::kSteps == 1 && more) {
          store(moving, moving_statistics, kQ, stage ^ 1);
          fetch(moving, moving_statistics, kDout, n + 1);
        }
        if (active) {
          find_ds(s, dp, x, full, n, pair);
          add_products(dk, dv, s, dp, q_rows, dout_rows);
        }
        if (more) store(moving, moving_statistics, C::kSteps == 1 ? kDout : part, stage ^ 1);
      }
    }
    __syncthreads();  // the stages are free for dV and dK
    write(dk, dv);
  }
};

template <class Op, class C, bool kAny>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    backward_keys_kernel(const __grid_constant__ FlashsciBackwardParams p,
                         const __grid_constant__ BackwardPlan plan, uint32_t tiles) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<KeyStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));

  const TileCoord place(blockIdx.x, tiles, p.heads_k, p);
  TileOfSequence tile;  // with the roles of keys and queries exchanged
  if (p.cu_seqlens_q != nullptr) {
    tile = find_tile<C::kBlockK>(place.tile, p.cu_seqlens_k, p.cu_seqlens_q, p.num_seqs, p.seq_k,
                                 p.seq_q);
  } else {
    tile = {static_cast<int>(place.tile), 0, p.seq_k, 0, p.seq_q};
  }
  const int tile_key = tile.tile * C::kBlockK;
  if (tile.tile < 0 || tile_key >= tile.seq_q) return;
  const KeyWarp<Op, C, kAny> warp(p, plan, tiles, tile_key, shared);
  {  // the fields of `load_work`
    const int keys = tile.seq_q, queries = tile.seq_k;
    const Window window(p.window_left, p.window_right, p.lower_right != 0, queries, keys);
    const int begin = first_query(window, tile_key);
    const int end = end_query(window, min(tile_key + C::kBlockK, keys) - 1, queries);
    const int first = begin / C::kBlockQ;
    const int count = begin < end ? (end + C::kBlockQ - 1) / C::kBlockQ - first : 0;
    if (threadIdx.x == 0) {
      shared.work[0] = make_int4(tile.first_q, keys, tile.first_k, queries);
      shared.work[1] = make_int4(first, count, count * (p.heads_q / p.heads_k), 0);
    }
  }
  __syncthreads();
  warp.run(place, tile);
}

}  // namespace flashsci::sm75::bwd
