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
#include "../common/pairs.cuh"
#include "../common/product.cuh"
#include "../common/sequence.cuh"
#include "../common/store_rows.cuh"
#include "../common/tile_registers.cuh"
#include "../common/window.cuh"
#include "backward_plan.cuh"

namespace flashsci::sm75 {

template <int kHeadDim_, int kBlockK_, int kBlockQ_, int kWarps_, int kMinBlocks_>
struct KeyTiling {
  static constexpr int kHeadDim = kHeadDim_, kBlockK = kBlockK_, kBlockQ = kBlockQ_;
  static constexpr int kWarps = kWarps_, kMinBlocks = kMinBlocks_, kThreads = 32 * kWarps;
  static constexpr int kKeys = kBlockK / kWarps, kM = kKeys / 16;  // of a warp
  static constexpr int kStep = kBlockQ / 2, kN = kStep / 8;        // queries at a time
  static constexpr int kDimBlocks = kHeadDim / 8;
  // Registers hold the fragments of these columns of V, and all of K; a tile in shared memory the
  // rest of V.
  static constexpr int kHeldV = kHeadDim <= 96 ? kHeadDim : kHeadDim / 2;
  static constexpr int kRestV = kHeadDim - kHeldV;
  static_assert(kKeys % 16 == 0 && kStep % 16 == 0 && kBlockQ <= kThreads, "whole mma tiles");
};

// What a CTA works on, in shared memory: the loop has no registers for it.
struct KeyWork {
  const uint16_t* volatile q;         // [head of the group, query of the sequence, D]
  const uint16_t* volatile dout;      // [head of the group, query of the sequence, Dv]
  const float2* volatile statistics;  // [head of the group, query of the sequence]
  volatile int first_key, keys;       // of the sequence
  volatile int queries;
  // Query tiles that see any key of the CTA: of every head, `tiles` from `first` on. Tile n of the
  // loop, n < total, is one of head n / tiles of the group.
  volatile int first, tiles, total;
};

template <class C>
struct alignas(128) KeyStorage {
  static constexpr int kStaged = 2 * 2 * C::kBlockQ;  // [stage, Q or dO, kBlockQ]
  static constexpr int kRows = kStaged > C::kBlockK ? kStaged : C::kBlockK;
  uint16_t tiles[kRows * C::kHeadDim];                     // [kRows, kHeadDim]
  uint16_t v[C::kRestV > 0 ? C::kBlockK * C::kRestV : 8];  // [kBlockK, kRestV]
  float2 statistics[2][C::kBlockQ];                        // [stage, kBlockQ]: -lse, -delta
  KeyWork work;
};

// (-lse, -delta) of two neighbouring queries.
__device__ __forceinline__ float4 load_statistics(uint32_t shared) {
  const uint4 x = ptx::ld_shared_v4(shared);
  return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                     __uint_as_float(x.w));
}

// A tile of rows on its way, whatever the rows are aligned to. kAny: vector says.
template <bool kAny, class Moving>
__device__ __forceinline__ void fetch_rows(Moving& moving, const uint16_t* rows, int64_t row_stride,
                                           int rows_valid, int columns, int copy_bytes,
                                           bool vector) {
  if (!kAny || vector)
    moving.template fetch<true>(rows, row_stride, rows_valid, columns, copy_bytes);
  else
    moving.template fetch<false>(rows, row_stride, rows_valid, columns, copy_bytes);
}

// Rows from `row` on of one head.
__device__ __forceinline__ const uint16_t* rows_of(const void* data, const FlashsciStrides& strides,
                                                   const Place& place, uint32_t head, int row) {
  return static_cast<const uint16_t*>(data) + place.offset(strides, head) + row * strides.row;
}

// kAny: with bias or mask, or rows of any alignment.
template <class Op, class C, bool kAny>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    backward_keys_kernel(const __grid_constant__ FlashsciBackwardParams p,
                         const __grid_constant__ BackwardPlan plan, uint32_t tiles) {
  using T = Tile<C::kHeadDim>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<KeyStorage<C>*>(shared_memory);

  // Which key tile of which key head; in what find_tile gives, keys are queries and queries keys.
  const Place place(blockIdx.x, tiles, p.heads_k, p.batch1);
  TileOfSequence found;
  if (p.cu_seqlens_q != nullptr) {
    found = find_tile<C::kBlockK>(place.tile, p.cu_seqlens_k, p.cu_seqlens_q, p.num_seqs, p.seq_k,
                                  p.seq_q);
  } else {
    found = {static_cast<int>(place.tile), 0, p.seq_k, 0, p.seq_q};
  }
  const int tile_key = found.tile * C::kBlockK;
  if (found.tile < 0 || tile_key >= found.seq_q) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_key = tile_key + warp * C::kKeys;
  KeyWork& work = shared.work;
  if (threadIdx.x == 0) {
    const int keys = found.seq_q, queries = found.seq_k, group = p.heads_q / p.heads_k;
    const Window window(p.window_left, p.window_right, p.lower_right != 0, queries, keys);
    const int begin = window.first_query(tile_key);
    const int end = window.end_query(min(tile_key + C::kBlockK, keys) - 1, queries);
    const uint32_t head = place.head * group;
    work.q = rows_of(p.q, p.q_strides, place, head, found.first_k);
    work.dout = rows_of(p.dout, p.dout_strides, place, head, found.first_k);
    work.statistics = plan.statistics +
                      (static_cast<int64_t>(place.batch) * p.heads_q + head) * p.seq_q +
                      found.first_k;
    work.first_key = found.first_q;
    work.keys = keys;
    work.queries = queries;
    work.first = begin / C::kBlockQ;
    work.tiles = begin < end ? (end + C::kBlockQ - 1) / C::kBlockQ - begin / C::kBlockQ : 0;
    work.total = work.tiles * group;
  }
  __syncthreads();

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
    const int tiles_of_head = work.tiles, member = n / tiles_of_head;
    const int row = (work.first + n - member * tiles_of_head) * C::kBlockQ;
    const int left = work.queries - row;
    const FlashsciStrides& strides = what == 0 ? p.q_strides : p.dout_strides;
    fetch_rows<kAny>(moving,
                     (what == 0 ? work.q : work.dout) + member * strides.head + row * strides.row,
                     strides.row, what == 0 || p.dout != nullptr ? left : 0,
                     what == 0 ? p.head_dim : p.head_dim_v, p.copy_bytes, plan.vector);
    if (what != 0) return;
    // A row that is not there has no probability, whatever its scores.
    moving_statistics = make_float2(-INFINITY, 0.f);
    if (static_cast<int>(threadIdx.x) < min(C::kBlockQ, left))
      moving_statistics =
          __ldg(work.statistics + static_cast<int64_t>(member) * p.seq_q + row + threadIdx.x);
  };
  const auto store = [&](int what, int stage) {
    moving.store(storage + (stage * 2 + what) * kTileBytes);
    if (what == 0 && threadIdx.x < C::kBlockQ)
      ptx::st_shared(
          statistics + (stage * C::kBlockQ + threadIdx.x) * 8,
          make_uint2(__float_as_uint(moving_statistics.x), __float_as_uint(moving_statistics.y)));
  };

  if (work.total > 0) {
    const int row = found.first_q + tile_key, left = found.seq_q - tile_key;
    const uint16_t* v_global = rows_of(p.v, p.v_strides, place, place.head, row);
    TileRegisters<C::kBlockK, C::kHeadDim, C::kThreads> rows;
    fetch_rows<kAny>(rows, rows_of(p.k, p.k_strides, place, place.head, row), p.k_strides.row, left,
                     p.head_dim, p.copy_bytes, plan.vector);
    rows.store(storage);
    fetch_rows<kAny>(rows, v_global, p.v_strides.row, left, p.head_dim_v, p.copy_bytes,
                     plan.vector);
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
      fetch_rows<kAny>(rest, v_global + C::kHeldV, p.v_strides.row, left, p.head_dim_v - C::kHeldV,
                       p.copy_bytes, plan.vector);
      rest.store(ptx::shared_address(shared.v));
    }
    store(1, 0);
  }
  uint32_t v_rest = 0;
  if constexpr (C::kRestV > 0)
    v_rest = ptx::shared_address(shared.v) + warp * C::kKeys * Tile<C::kRestV>::kRowBytes +
             row_fragment<C::kRestV>(lane);

#pragma unroll 1
  for (int n = 0; n < work.total; ++n) {
    __syncthreads();  // Q_n and dO_n are there; nobody reads the other stage any more
    const int stage = n % 2;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const bool more = n + 1 < work.total;
      if (more) fetch(half, n + 1);
      // Some of these queries see some of this warp's keys; all see all.
      const int keys = work.keys, queries = work.queries;
      const Window window(p.window_left, p.window_right, p.lower_right != 0, queries, keys);
      const int step = half * C::kStep;
      const int query = (work.first + n % work.tiles) * C::kBlockQ + step;
      const int last_query = min(query + C::kStep, queries) - 1;
      const int last_key = min(warp_key + C::kKeys, keys) - 1;
      const bool active =
          query < queries && window.begin(query) <= last_key && window.end(last_query) > warp_key;
      const bool full =
          window.begin(last_query) <= warp_key && window.end(query) >= warp_key + C::kKeys;
      if (active) {
        float s[C::kM][C::kN][4];   // S^T, then P^T: [m16 of keys, n8 of queries, fragment]
        float dp[C::kM][C::kN][4];  // dP^T - delta, then dS^T
        const uint32_t q_rows = storage + stage * 2 * kTileBytes + step * T::kRowBytes;
        const uint32_t dout_rows = q_rows + kTileBytes;
        const uint32_t pair = statistics + (stage * C::kBlockQ + step + lane % 4 * 2) * 8;
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
        scale_scores(s, plan.scores,
                     [&](int m, int j, int e, float slope) { dp[m][j][e] *= slope; });
        const int key = warp_key + lane / 4, column = query + lane % 4 * 2;
        if constexpr (kAny) {
          const Place here(opaque(blockIdx.x), tiles, p.heads_k, p.batch1);
          const uint32_t head = here.head * (p.heads_q / p.heads_k) + n / work.tiles;
          apply_pairs<Op, true>(s, PairsView(p.pairs, here.batch0, here.batch1, head), key, column,
                                queries, keys, 1.f);
        }
        if (!full) mask_scores_transposed(s, window, key, column);
#pragma unroll
        for (int j = 0; j < C::kN; ++j) {
          const float4 x = load_statistics(pair + j * 64);
#pragma unroll
          for (int i = 0; i < C::kM * 4; ++i) {
            const int m = i / 4, e = i % 4;
            s[m][j][e] =
                ptx::ex2_approx(fmaf(s[m][j][e], plan.scores.exp_scale, e % 2 == 0 ? x.x : x.z));
            dp[m][j][e] *= s[m][j][e];
          }
        }
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
      if (more) store(half, stage ^ 1);
    }
  }

  __syncthreads();  // the stages are free for dV and dK
  const int rows = work.keys - warp_key;
  const int64_t row = work.first_key + warp_key;
  const Place home(opaque(blockIdx.x), tiles, p.heads_k, p.batch1);  // found again, not kept
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

}  // namespace flashsci::sm75
