// Backward attention for tensor cores of the mma.sync generation: dk, dv, and dq by the way.
//
// Maths     P = exp(S - lse), dP = dO V^T, dS = P (dP - delta) [times the softcap's slope],
//           dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K; delta = rowsum(dO O) - dlse.
// Roles     One CTA per (key tile, key head, batch), all on grid.x; it goes through the query heads
//           of its key head and the query tiles that see its keys, so dK and dV have one owner. All
//           products are transposed, rows are keys: P^T and dS^T leave their product as left
//           operands of the next. kWarpsK groups of warps own 32 keys each. kWarpsQ = 1 (D <= 64):
//           a group is one warp, with dK and dV of its keys. kWarpsQ = 2: the warps of a group
//           halve the queries of S and dP; then one sums dV, the other dK, over all queries.
//           kWarpsQ = 4: so do two pairs, for half of the columns each. dQ contracts over all keys
//           of the CTA.
// Shared    K, V (later dK, dV), two stages of Q, dO and row statistics, dS^T for dQ, P^T and dS^T
//           for the partners: `BackwardShared`.
// Pipeline  Two barriers a tile: stage n has landed and n - 1 is free; dS_n is written. Stage n + 1
//           flies during all of tile n. dQ leaves by coalesced red.add to fp32 sums in fragment
//           order (preprocess.cuh turns them), or, with one key tile, straight to memory.
// Limits    Shared-memory reads, then HMMA issue: docs/kernels/sm80_backward.md.
#pragma once
#include "../../core/poison.cuh"
#include "../../core/row_statistics.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/redux.cuh"
#include "../../ptx/shared.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "warp_mma.cuh"

namespace flashsci::sm80::bwd {

template <int kHeadDim_, int kBlockK_, int kBlockQ_, int kWarpsK_, int kWarpsQ_, int kStages_,
          int kMinBlocks_, int kStep_ = 32>
struct BackwardTiling {
  static constexpr int kHeadDim = kHeadDim_, kBlockK = kBlockK_, kBlockQ = kBlockQ_;
  static constexpr int kWarpsK = kWarpsK_, kWarpsQ = kWarpsQ_;
  static constexpr int kStages = kStages_, kMinBlocks = kMinBlocks_;
  static constexpr int kWarps = kWarpsK * kWarpsQ, kThreads = 32 * kWarps;
  static constexpr int kKeys = kBlockK / kWarpsK;                      // keys of a warp
  static constexpr int kQueries = kBlockQ / kWarpsQ;                   // queries of a warp
  static constexpr int kStep = kQueries < kStep_ ? kQueries : kStep_;  // those of them at a time
  static constexpr int kM = kKeys / 16, kN = kStep / 8;
  // Accumulators of a warp: dV and dK (one role), or one of them; all columns or half.
  static constexpr int kRoles = kWarpsQ == 1 ? 1 : 2, kSums = kWarpsQ == 1 ? 2 : 1;
  static constexpr int kDimSplit = kWarpsQ / kRoles;
  static constexpr int kChunkPairs = kHeadDim / 16 / kDimSplit;  // chunk pairs of an accumulator
  // dQ: warps over queries x columns, 32 queries a warp where whole pairs of chunks are left.
  static constexpr int kDqWide = kBlockQ / 32, kDqWideColumns = kHeadDim * kDqWide / kWarps;
  static constexpr int kDqWarpsQ = kDqWideColumns % 16 == 0 ? kDqWide : 2 * kDqWide;
  static constexpr int kDqWarpsD = kWarps / kDqWarpsQ;
  static constexpr int kDqM = kBlockQ / kDqWarpsQ / 16;
  static constexpr int kDqPairs = kHeadDim / kDqWarpsD / 16;
  static constexpr int kDqValues = kDqM * kDqPairs * 2 * 4;  // of a lane
  static_assert(kKeys % 16 == 0 && kStep % 16 == 0 && kBlockQ <= 64, "whole mma and swizzle tiles");
  static_assert(kDqM * kDqPairs * kWarps * 256 == kBlockQ * kHeadDim, "dQ is split evenly");
};

template <class C>
struct alignas(128) BackwardShared {
  uint16_t k[C::kBlockK * C::kHeadDim];                   // [kBlockK, kHeadDim], later dK
  uint16_t v[C::kBlockK * C::kHeadDim];                   // [kBlockK, kHeadDim], later dV
  uint16_t q[C::kStages][C::kBlockQ * C::kHeadDim];       // [stage, kBlockQ, kHeadDim]
  uint16_t dout[C::kStages][C::kBlockQ * C::kHeadDim];    // [stage, kBlockQ, kHeadDim]
  uint16_t products[C::kRoles][C::kBlockK * C::kBlockQ];  // dS^T, and P^T for partners
  float2 statistics[C::kStages][C::kBlockQ];              // [stage, kBlockQ]: -lse, -delta
};

// Scores that the window hides become -inf, where rows are keys. row: this lane's first key;
// column: the query of its first score.
template <int kM, int kN>
__device__ __forceinline__ void mask_scores_transposed(float (&s)[kM][kN][4], const Window& window,
                                                       int row, int column) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = row + m * 16 + half * 8;
      const int begin = j < window.seq_k ? window.first_query(j) - column : 1 << 30;
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

template <class Op, class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    backward_kernel(const __grid_constant__ FlashsciBackwardParams p,
                    const __grid_constant__ BackwardPlan plan, uint32_t tiles) {
  using T = Tile<C::kHeadDim>;
  using TS = Tile<C::kBlockQ>;  // of P^T and dS^T
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<BackwardShared<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));

  // Which key tile of which key head.
  const TileCoord place(blockIdx.x, tiles, p.heads_k, p);
  int tile = static_cast<int>(place.tile), segment = 0;
  int first_key = 0, keys = p.seq_k, first_query = 0, queries = p.seq_q;
  if (p.cu_seqlens_q != nullptr) {
    const TileOfSequence work = find_tile<C::kBlockK>(place.tile, p.cu_seqlens_k, p.cu_seqlens_q,
                                                      p.num_seqs, p.seq_k, p.seq_q);
    tile = work.tile, segment = work.segment;
    first_key = work.first_q, keys = work.seq_q;
    first_query = work.first_k, queries = work.seq_k;
    if (plan.writes_dq && (segment == 0 || segment > p.num_seqs)) {  // rows of no sequence
      first_query = segment_begin(p.cu_seqlens_q, segment, p.num_seqs, p.seq_q);
      queries =
          max(segment_begin(p.cu_seqlens_q, segment + 1, p.num_seqs, p.seq_q) - first_query, 0);
    }
  }
  const bool owned = p.cu_seqlens_q == nullptr || (segment > 0 && segment <= p.num_seqs);
  const int group = p.heads_q / p.heads_k;
  if (plan.writes_dq && tile == 0 && (keys <= 0 || !owned)) {
    for (int member = 0; member < group; ++member)
      zero_rows(static_cast<uint16_t*>(p.dq) +
                    place.offset(p.dq_strides, place.head * group + member) +
                    first_query * p.dq_strides.row,
                p.dq_strides.row, queries, p.head_dim, C::kThreads);
  }
  const int tile_key = tile * C::kBlockK;
  if (tile < 0 || tile_key >= keys) return;
  if (!owned) queries = 0;

  const int warp = ptx::redux_max(threadIdx.x / 32);
  const int lane = threadIdx.x % 32;
  const int warp_k = warp / C::kWarpsQ, warp_q = warp % C::kWarpsQ;
  const int role = C::kRoles == 2 ? warp_q % 2 : 0, dim_part = warp_q / C::kRoles;
  const int warp_key = tile_key + warp_k * C::kKeys;

  // Query tiles that see any key of this CTA; all of them where dq is written here.
  Window window(p.window_left, p.window_right, p.lower_right != 0, queries, keys);
  window.before = ptx::redux_max(window.before);
  window.after = ptx::redux_max(window.after);
  int begin_query = 0, end_query = queries;
  if (!plan.writes_dq) {
    begin_query = window.first_query(tile_key);
    end_query = window.end_query(min(tile_key + C::kBlockK, keys) - 1, queries);
  }
  const int first_tile = begin_query / C::kBlockQ;
  const int end_tile =
      begin_query < end_query ? (end_query + C::kBlockQ - 1) / C::kBlockQ : first_tile;

  const uint32_t k_tile = ptx::shared_address(shared.k);
  const uint32_t v_tile = ptx::shared_address(shared.v);
  const uint32_t q_tile = ptx::shared_address(shared.q);
  const uint32_t dout_tile = ptx::shared_address(shared.dout);
  const uint32_t ds_tile = ptx::shared_address(shared.products);
  const uint32_t p_tile = ds_tile + (C::kRoles - 1) * C::kBlockK * TS::kRowBytes;
  const uint32_t statistics_tile = ptx::shared_address(shared.statistics);
  constexpr int kStageBytes = C::kBlockQ * T::kRowBytes;

  const auto load = [&](auto rows, uint32_t target, const void* data,
                        const FlashsciStrides& strides, uint32_t head, int row, int rows_valid,
                        int columns) {
    constexpr int kRows = decltype(rows)::value;
    const uint16_t* source =
        static_cast<const uint16_t*>(data) + place.offset(strides, head) + row * strides.row;
    load_tile<kRows, C::kHeadDim, C::kThreads, true, true>(target, source, strides.row, rows_valid,
                                                           columns, 16);
  };
  const auto load_queries = [&](int member, int query_tile, int stage) {
    using Rows = std::integral_constant<int, C::kBlockQ>;
    const uint32_t head = place.head * group + member;
    const int row = query_tile * C::kBlockQ;
    load(Rows{}, q_tile + stage * kStageBytes, p.q, p.q_strides, head, first_query + row,
         queries - row, p.head_dim);
    load(Rows{}, dout_tile + stage * kStageBytes, p.dout, p.dout_strides, head, first_query + row,
         p.dout != nullptr ? queries - row : 0, p.head_dim_v);
    const int thread = threadIdx.x;
    if (thread < C::kBlockQ) {
      const float2* source = plan.statistics +
                             (static_cast<int64_t>(place.batch) * p.heads_q + head) * p.seq_q +
                             first_query + row;
      const uint32_t target = statistics_tile + (stage * C::kBlockQ + thread) * 8;
      if (row + thread < queries)
        ptx::cp_async_small<8>(target, source + thread, 8);
      else  // no probability, whatever the scores of rows that do not exist
        ptx::st_shared(target, make_uint2(__float_as_uint(-INFINITY), 0));
    }
  };

  float sums[C::kSums][C::kM][2 * C::kChunkPairs]
            [4];  // dV and dK, or one of them: [m16, n8, fragment]
#pragma unroll
  for (int i = 0; i < C::kSums; ++i) set_zero(sums[i]);

  if (first_tile < end_tile) {
    using Rows = std::integral_constant<int, C::kBlockK>;
    load(Rows{}, k_tile, p.k, p.k_strides, place.head, first_key + tile_key, keys - tile_key,
         p.head_dim);
    load(Rows{}, v_tile, p.v, p.v_strides, place.head, first_key + tile_key, keys - tile_key,
         p.head_dim_v);
    if (C::kStages == 2) load_queries(0, first_tile, 0);
    ptx::cp_async_commit();
  }

  const uint32_t k_left = k_tile + warp_k * C::kKeys * T::kRowBytes + lane_by_rows<C::kHeadDim>();
  const uint32_t v_left = k_left + (v_tile - k_tile);
  // Where this lane's fragments of P^T and dS^T go: key lane / 4, query lane % 4 * 2.
  const uint32_t products_out =
      ds_tile + warp_k * C::kKeys * TS::kRowBytes + TS::offset(lane / 4, 0) + lane % 4 * 4;
  const int dq_warp_q = warp / C::kDqWarpsD, dq_warp_d = warp % C::kDqWarpsD;

  int stage = 0;
#pragma unroll 1
  for (int member = 0, query_tile = first_tile; member < group && query_tile < end_tile;) {
    const bool last = query_tile + 1 == end_tile;
    const int next_member = last ? member + 1 : member;
    const int next_tile = last ? first_tile : query_tile + 1;
    if constexpr (C::kStages == 1) {
      __syncthreads();  // nobody reads the tile before
      load_queries(member, query_tile, 0);
      ptx::cp_async_commit();
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // this stage has landed; nobody reads the other one, P or dS any more
    if constexpr (C::kStages == 2) {
      if (next_member < group) load_queries(next_member, next_tile, stage ^ 1);
      ptx::cp_async_commit();
    }

    const int tile_query = query_tile * C::kBlockQ;
    const uint32_t q_stage = q_tile + stage * kStageBytes;
    const uint32_t dout_stage = dout_tile + stage * kStageBytes;
#pragma unroll 1
    for (int step = warp_q * C::kQueries; step < (warp_q + 1) * C::kQueries; step += C::kStep) {
      const int query = tile_query + step;
      // Some of these queries see some of this warp's keys; all see all.
      const int last_query = min(query + C::kStep, queries) - 1;
      const int last_key = min(warp_key + C::kKeys, keys) - 1;
      const bool active =
          query < queries && window.begin(query) <= last_key && window.end(last_query) > warp_key;
      const bool full =
          window.begin(last_query) <= warp_key && window.end(query) >= warp_key + C::kKeys;
      uint32_t p16[C::kN / 2][C::kM][4], ds16[C::kN / 2][C::kM][4];
      if (active) {
        float s[C::kM][C::kN][4];   // S^T, then P^T
        float dp[C::kM][C::kN][4];  // dP^T - delta, then dS^T
        const uint32_t b_lane = lane_by_chunks<C::kHeadDim>() + step * T::kRowBytes;
        const uint32_t statistics =
            statistics_tile + (stage * C::kBlockQ + step) * 8 + lane % 4 * 16;
        set_zero(s);
        multiply_rows<Op, C::kHeadDim>(s, k_left, q_stage + b_lane);
#pragma unroll
        for (int n = 0; n < C::kN; ++n) {
          const float4 x = load_statistics(statistics + n * 64);
#pragma unroll
          for (int m = 0; m < C::kM; ++m) {
            dp[m][n][0] = dp[m][n][2] = x.y;
            dp[m][n][1] = dp[m][n][3] = x.w;
          }
        }
        multiply_rows<Op, C::kHeadDim>(dp, v_left, dout_stage + b_lane);
        if (plan.score_mode == kSoftcap)
          apply_softcap(s, dp, plan);
        else if (plan.score_mode == kLinear)
          scale_linear(s, plan.score_inner);
        const int key = warp_key + lane / 4, column = query + lane % 4 * 2;
        if (!full) mask_scores_transposed(s, window, key, column);
#pragma unroll
        for (int n = 0; n < C::kN; ++n) {
          const float4 x = load_statistics(statistics + n * 64);
#pragma unroll
          for (int m = 0; m < C::kM; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              s[m][n][e] =
                  ptx::ex2_approx(fmaf(s[m][n][e], plan.exp_scale, e % 2 == 0 ? x.x : x.z));
            }
          }
        }
        if (any_large_column<C::kN>(statistics)) limit_probabilities(s);
#pragma unroll
        for (int i = 0; i < C::kM * C::kN * 4; ++i)
          dp[i / (4 * C::kN)][i / 4 % C::kN][i % 4] *= s[i / (4 * C::kN)][i / 4 % C::kN][i % 4];
        pack<Op>(p16, s);
        pack<Op>(ds16, dp);
      } else {
#pragma unroll
        for (int i = 0; i < C::kN / 2 * C::kM * 4; ++i)
          p16[i / (4 * C::kM)][i / 4 % C::kM][i % 4] = ds16[i / (4 * C::kM)][i / 4 % C::kM][i % 4] =
              0;
      }
#pragma unroll
      for (int i = 0; i < C::kN / 2 * C::kM * 4; ++i) {
        const int k = i / (4 * C::kM), m = i / 4 % C::kM, part = i % 4;
        const uint32_t target = ((products_out ^ (step * 2)) ^ ((2 * k + part / 2) * kChunkBytes)) +
                                (m * 16 + part % 2 * 8) * TS::kRowBytes;
        ptx::st_shared(target, ds16[k][m][part]);
        if (C::kRoles == 2 && (C::kDimSplit > 1 || role == 1))
          ptx::st_shared(target + (p_tile - ds_tile), p16[k][m][part]);
      }
      if (active) {
        if constexpr (C::kRoles == 1) {
          const Span<C::kHeadDim, C::kChunkPairs> dout_right(
              dout_stage + step * T::kRowBytes + lane_by_rows<C::kHeadDim>(), 0);
          const Span<C::kHeadDim, C::kChunkPairs> q_right(
              q_stage + step * T::kRowBytes + lane_by_rows<C::kHeadDim>(), 0);
#pragma unroll
          for (int k = 0; k < C::kN / 2; ++k)
            multiply_16<Op>(sums[0], p16[k], dout_right, k * 16 * T::kRowBytes);
#pragma unroll
          for (int k = 0; k < C::kN / 2; ++k)
            multiply_16<Op>(sums[C::kSums - 1], ds16[k], q_right, k * 16 * T::kRowBytes);
        } else {
          const Span<C::kHeadDim, C::kChunkPairs> right((role == 0 ? dout_stage : q_stage) +
                                                            step * T::kRowBytes +
                                                            lane_by_rows<C::kHeadDim>(),
                                                        dim_part);
#pragma unroll
          for (int k = 0; k < C::kN / 2; ++k) {
            uint32_t a[C::kM][4];
#pragma unroll
            for (int i = 0; i < C::kM * 4; ++i)
              a[i / 4][i % 4] = role == 0 ? p16[k][i / 4][i % 4] : ds16[k][i / 4][i % 4];
            multiply_16<Op>(sums[0], a, right, k * 16 * T::kRowBytes);
          }
        }
      }
    }
    __syncthreads();  // dS and P are written

    // The queries that other warps of the group had.
    if constexpr (C::kRoles == 2) {
      const uint32_t left = (role == 0 ? p_tile : ds_tile) + warp_k * C::kKeys * TS::kRowBytes +
                            lane_by_rows<C::kBlockQ>();
#pragma unroll 1
      for (int other = 1; other < C::kWarpsQ; ++other) {
        const int from = (warp_q ^ other) * C::kQueries;
        const Span<C::kHeadDim, C::kChunkPairs> right(
            (role == 0 ? dout_stage : q_stage) + from * T::kRowBytes + lane_by_rows<C::kHeadDim>(),
            dim_part);
#pragma unroll
        for (int k = 0; k < C::kQueries / 16; ++k) {
          uint32_t a[C::kM][4];
#pragma unroll
          for (int m = 0; m < C::kM; ++m)
            ptx::ldmatrix_x4(a[m], (left ^ (from * 2 + k * 32)) + m * 16 * TS::kRowBytes);
          multiply_16<Op>(sums[0], a, right, k * 16 * T::kRowBytes);
        }
      }
    }

    if (plan.adds_dq || plan.writes_dq) {
      float dq[C::kDqM][2 * C::kDqPairs][4];
      set_zero(dq);
      const uint32_t left = ds_tile + lane_by_chunks<C::kBlockQ>();
      const Span<C::kHeadDim, C::kDqPairs> right(k_tile + lane_by_rows<C::kHeadDim>(), dq_warp_d);
#pragma unroll
      for (int k = 0; k < C::kBlockK / 16; ++k) {
        uint32_t a[C::kDqM][4];  // dS [16 kDqM queries, 16 keys]
#pragma unroll
        for (int m = 0; m < C::kDqM; ++m)
          ptx::ldmatrix_x4_trans(
              a[m], (left ^ ((dq_warp_q * C::kDqM + m) * 32)) + k * 16 * TS::kRowBytes);
        multiply_16<Op>(dq, a, right, k * 16 * T::kRowBytes);
      }
      const uint32_t head = place.head * group + member;
      if (plan.writes_dq) {
        const int row = tile_query + dq_warp_q * C::kDqM * 16;
        uint16_t* target = static_cast<uint16_t*>(p.dq) + place.offset(p.dq_strides, head) +
                           (first_query + row) * p.dq_strides.row;
        store_rows_direct<Op>(dq, p.scale, target, p.dq_strides.row, queries - row,
                              dq_warp_d * C::kDqPairs * 16, p.head_dim, plan.vector_dq);
      } else {
        const int64_t slot =
            (static_cast<int64_t>(place.batch) * p.heads_q + head) * plan.query_slots +
            (p.cu_seqlens_q != nullptr ? first_query / C::kBlockQ + segment : 0) + query_tile;
        float* target =
            plan.dq_sums + slot * (C::kBlockQ * C::kHeadDim) + warp * C::kDqValues * 32 + lane;
#pragma unroll
        for (int i = 0; i < C::kDqValues; ++i)
          atomicAdd(target + i * 32, dq[i / (8 * C::kDqPairs)][i / 4 % (2 * C::kDqPairs)][i % 4]);
      }
    }
    member = next_member;
    query_tile = next_tile;
    if (C::kStages == 2) stage ^= 1;
  }

  // The tiles of K and V become those of dK and dV.
  __syncthreads();
  const int rows = keys - warp_key;
  const int64_t row = first_key + warp_key;
  const uint32_t warp_rows = warp_k * C::kKeys * T::kRowBytes;
  const int chunk = dim_part * C::kChunkPairs * 2;
  if (p.dv != nullptr && (C::kRoles == 1 || role == 0))
    store_gradient<Op, C::kHeadDim, false>(sums[0], 1.f, v_tile + warp_rows, chunk,
                                           static_cast<uint16_t*>(p.dv) +
                                               place.offset(p.dv_strides, place.head) +
                                               row * p.dv_strides.row,
                                           p.dv_strides.row, rows, p.head_dim_v, plan.vector_dv);
  if (p.dk != nullptr && (C::kRoles == 1 || role == 1))
    store_gradient<Op, C::kHeadDim, false>(sums[C::kSums - 1], p.scale, k_tile + warp_rows, chunk,
                                           static_cast<uint16_t*>(p.dk) +
                                               place.offset(p.dk_strides, place.head) +
                                               row * p.dk_strides.row,
                                           p.dk_strides.row, rows, p.head_dim, plan.vector_dk);
}

}  // namespace flashsci::sm80::bwd
