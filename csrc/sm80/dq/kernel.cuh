// dq alone, by query tiles: for deterministic calls, whose sums over key tiles need one owner, and
// for calls that want neither dk nor dv. Without dq: the gradient of slopes of ALiBi.
//
// Maths     As in bwd/kernel.cuh: dQ = scale dS K; dropout as in bwd/bias_mask_kernel.cuh. Slopes:
//           core/alibi.cuh, with dS before the slope of a softcap that does not bound ALiBi.
// Roles     One CTA per (query tile, query head, batch), all on grid.x, four warps with 32 (D >
//           128: 16) query rows each. dS leaves its product as left operand of the next: warps
//           share only tiles of K and V.
// Shared    Q (later dQ), dO, kStages x (K, V): `QueryShared`.
// Pipeline  As in the forward: with two stages K_n+1 and V_n+1 are copied during tile n, one
//           barrier a tile.
// Limits    As in the forward: HMMA issue, shared-memory reads. With bwd/kernel.cuh 7 products a
//           tile where 5 would do: the price of bitwise equal runs. Ordered additions would save
//           it, but a CTA would wait for others, up to a whole grid's skew.
#pragma once
#include "../../core/alibi.cuh"
#include "../../core/bias_mask.cuh"
#include "../../core/dropout.cuh"
#include "../../core/poison.cuh"
#include "../../core/ragged_bias.cuh"
#include "../../core/row_statistics.cuh"
#include "../bwd/config.cuh"
#include "../bwd/epilogue.cuh"
#include "../bwd/warp_mma.cuh"

namespace flashsci::sm80::dq {

using namespace bwd;  // this kernel is part of the backward

template <int kHeadDim_, int kBlockQ_, int kBlockK_, int kStages_, int kMinBlocks_>
struct QueryTiling {
  static constexpr int kHeadDim = kHeadDim_, kBlockQ = kBlockQ_, kBlockK = kBlockK_;
  static constexpr int kStages = kStages_, kMinBlocks = kMinBlocks_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kRows = kBlockQ / kWarps, kM = kRows / 16;
  static constexpr int kStep = 32, kN = kStep / 8;  // keys per step
  static_assert(kRows % 16 == 0 && kBlockK % kStep == 0, "whole mma tiles");
};

template <class C>
struct alignas(128) QueryShared {
  uint16_t q[C::kBlockQ * C::kHeadDim];              // [kBlockQ, kHeadDim], later dQ
  uint16_t dout[C::kBlockQ * C::kHeadDim];           // [kBlockQ, kHeadDim]
  uint16_t k[C::kStages][C::kBlockK * C::kHeadDim];  // [stage, kBlockK, kHeadDim]
  uint16_t v[C::kStages][C::kBlockK * C::kHeadDim];  // [stage, kBlockK, kHeadDim]
  float2 statistics[C::kBlockQ];                     // [kBlockQ]: -lse, -delta
};

__device__ __forceinline__ float2 load_pair(const volatile float2* x) {
  return make_float2(x->x, x->y);
}

// (-lse, -delta) of kRows rows from `statistics` on; rows past the last have no probability.
template <int kRows>
__device__ __forceinline__ void load_row_statistics(float2* shared,
                                                    const float2* __restrict__ statistics,
                                                    int rows_valid) {
  const int row = threadIdx.x;
  if (row >= kRows) return;
  const uint32_t target = ptx::shared_address(shared + row);
  if (row < rows_valid)
    ptx::cp_async_small<8>(target, statistics + row, 8);
  else
    ptx::st_shared(target, make_uint2(__float_as_uint(-INFINITY), 0));
}

// dP - delta / scale of what is dropped becomes -delta / scale. statistics: of the rows of a lane.
template <int kM, int kN>
__device__ __forceinline__ void drop_gradients(float (&dp)[kM][kN][4],
                                               const float2 (&statistics)[kM][2], uint32_t kept) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i)
    if (!(kept >> bit_of_element(i / 4, i % 4) & 1))
      dp[i / (4 * kN)][i / 4 % kN][i % 4] = statistics[i / (4 * kN)][i % 4 / 2].y;
}

// The state of a warp in the loop over tiles of keys, for its kRows query rows.
template <class Op, class C, class Drop>
struct QueryWarp {
  using T = Tile<C::kHeadDim>;
  using Scores = float[C::kM][C::kN][4];
  using Statistics = float2[C::kM][2];            // [m16, row g or g + 8]
  using Sums = float[C::kM][C::kHeadDim / 8][4];  // [m16, n8, fragment]
  static constexpr int kStageBytes = C::kBlockK * T::kRowBytes;

  const FlashsciBackwardParams& p;
  const BackwardPlan& plan;
  QueryShared<C>& shared;
  const TileCoord& place;
  const TileOfSequence& work;
  const int tile_row = work.tile * C::kBlockQ;
  const int warp = ptx::redux_max(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int warp_row = tile_row + warp * C::kRows;
  const int warp_last_row = min(warp_row + C::kRows, work.seq_q) - 1;
  const uint32_t head_k = place.head / static_cast<uint32_t>(p.heads_q / p.heads_k);
  const Window window{p.window_left, p.window_right, p.lower_right != 0, work.seq_q, work.seq_k};
  const uint32_t q_tile = ptx::shared_address(shared.q);
  const uint32_t dout_tile = ptx::shared_address(shared.dout);
  const uint32_t k_tile = ptx::shared_address(shared.k);
  const uint32_t v_tile = ptx::shared_address(shared.v);
  const uint32_t q_left = q_tile + warp * C::kRows * T::kRowBytes + lane_by_rows<C::kHeadDim>();
  const uint32_t dout_left = q_left + (dout_tile - q_tile);
  BiasMaskView view{p.bias_mask, place.batch0, place.batch1, place.head};
  Sums& dq;
  const Drop dropping;

  __device__ __forceinline__ QueryWarp(const FlashsciBackwardParams& p_, const BackwardPlan& plan_,
                                       QueryShared<C>& shared_, const TileCoord& place_,
                                       const TileOfSequence& work_, int64_t bias_start, Sums& dq_,
                                       const Drop& dropping_)
      : p(p_),
        plan(plan_),
        shared(shared_),
        place(place_),
        work(work_),
        dq(dq_),
        dropping(dropping_) {
    if (has_slopes(p.bias_mask)) view.bias = nullptr;
    view.bias += bias_start * (p.bias_mask.bias_is_fp32 ? 4 : 2);
  }

  template <int kRows>
  __device__ __forceinline__ void load(uint32_t target, const void* data,
                                       const FlashsciStrides& strides, uint32_t head, int row,
                                       int rows_valid, int columns) const {
    load_tile_rows<C, kRows>(target, data, place.offset(strides, head), strides, row, rows_valid,
                             columns, p.copy_bytes, plan.vector);
  }
  __device__ __forceinline__ void load_keys(int tile, int stage) const {
    const int row = tile * C::kBlockK, first = work.first_k + row, rows = work.seq_k - row;
    load<C::kBlockK>(k_tile + stage * kStageBytes, p.k, p.k_strides, head_k, first, rows,
                     p.head_dim);
    load<C::kBlockK>(v_tile + stage * kStageBytes, p.v, p.v_strides, head_k, first, rows,
                     p.head_dim_v);
  }
  __device__ __forceinline__ void load_queries() const {
    const int row = work.first_q + tile_row, rows = work.seq_q - tile_row;
    load<C::kBlockQ>(q_tile, p.q, p.q_strides, place.head, row, rows, p.head_dim);
    load<C::kBlockQ>(dout_tile, p.dout, p.dout_strides, place.head, row,
                     p.dout != nullptr ? rows : 0, p.head_dim_v);
    load_row_statistics<C::kBlockQ>(
        shared.statistics,
        plan.statistics + (static_cast<int64_t>(place.batch) * p.heads_q + place.head) * p.seq_q +
            row,
        rows);
  }

  // Whether some of this warp's rows see some of the kStep keys from `key` on.
  __device__ __forceinline__ bool any_seen(int key) const {
    return warp_row < work.seq_q && key < window.end(warp_last_row) &&
           key + C::kStep > window.begin(warp_row);
  }
  // Whether all of them see all of those.
  __device__ __forceinline__ bool all_seen(int key) const {
    return window.begin(warp_last_row) <= key && window.end(warp_row) >= key + C::kStep;
  }

  __device__ __forceinline__ void load_statistics(Statistics& statistics) const {
#pragma unroll
    for (int i = 0; i < C::kM * 2; ++i)
      statistics[i / 2][i % 2] = load_pair(&shared.statistics[warp * C::kRows + i * 8 + lane / 4]);
  }
  // S becomes P, dP - delta becomes dS.
  __device__ __forceinline__ void exponentiate(Scores& s, Scores& dp,
                                               const Statistics& statistics) const {
#pragma unroll
    for (int i = 0; i < C::kM * C::kN * 4; ++i) {
      const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
      s[m][n][e] = ptx::ex2_approx(fmaf(s[m][n][e], plan.scores.exp_scale, statistics[m][e / 2].x));
    }
    if (any_large(statistics)) limit_probabilities(s);
    multiply_elements(dp, s);
  }
  // Whether p.dbias, not dq, is wanted: sums for the gradient of slopes, in the registers of dq.
  __device__ __forceinline__ bool sums_slopes() const { return p.dq == nullptr; }
  // i + shift - j of query `row` and key `column`.
  __device__ __forceinline__ int ahead(int row, int column) const {
    return row - column + (p.lower_right != 0 ? work.seq_k - work.seq_q : 0);
  }
  __device__ __forceinline__ void add_bias(Scores& s, int key) const {
    // opaque: registers through the softcap cost too much.
    const int row = warp_row + opaque(lane) / 4, column = key + opaque(lane) % 4 * 2;
    if (has_slopes(p.bias_mask)) {
      const float slope = p.cu_seqlens_q != nullptr
                              ? slope_of_segment(p.bias_mask, work.segment, p.num_seqs, place.head)
                              : slope_of(p.bias_mask, place, place.head);
      add_alibi(s, slope * plan.bias_factor, ahead(row, column));
    }
    add_pairs(s, row, column);
  }
  // apply_bias, also with the rows of a ragged bias.
  __device__ __forceinline__ void add_pairs(Scores& s, int row, int column) const {
    if (view.bias == nullptr) return;
    FlashsciScoreStrides strides = p.bias_mask.bias_strides;
    strides.row = row_of_pairs(strides, plan.ragged, work.seq_k);
    const auto add = [&](int m, int half, int n, int e, float bias) {
      s[m][n][half * 2 + e] = fmaf(bias, plan.bias_factor, s[m][n][half * 2 + e]);
    };
    if (p.bias_mask.bias_is_fp32) {
      visit_pairs<false, C::kM, C::kN, float, float2>(view.bias, strides, row, column, work.seq_q,
                                                      work.seq_k, add);
    } else {
      const auto convert = [&](int m, int half, int n, int e, uint16_t bias) {
        add(m, half, n, e, Op::to_float(bias));
      };
      visit_pairs<false, C::kM, C::kN, uint16_t, ushort2>(view.bias, strides, row, column,
                                                          work.seq_q, work.seq_k, convert);
    }
  }
  // dQ from kStep keys, whose rows begin at k_rows and v_rows.
  __device__ __forceinline__ void add_step(uint32_t k_rows, uint32_t v_rows, int key) {
    uint32_t kept = 0;
    if constexpr (Drop::kDrops) {
      const uint32_t entry = p.cu_seqlens_q != nullptr ? work.segment - 1 : place.batch;
      kept = dropping.template draw_rows<C::kM, C::kN>(
          dropping.read_seed(), 0, entry * p.heads_q + place.head, warp_row + lane / 4, key);
    }
    Scores s, dp;
    Statistics statistics;
    load_statistics(statistics);
    set_zero(s);
    multiply_rows<Op, C::kHeadDim>(s, q_left, k_rows + lane_by_chunks<C::kHeadDim>());
#pragma unroll
    for (int i = 0; i < C::kM * C::kN * 4; ++i)
      dp[i / (4 * C::kN)][i / 4 % C::kN][i % 4] = statistics[i / (4 * C::kN)][i % 4 / 2].y;
    multiply_rows<Op, C::kHeadDim>(dp, dout_left, v_rows + lane_by_chunks<C::kHeadDim>());
    if constexpr (Drop::kDrops) drop_gradients(dp, statistics, kept);
    const bool capped = p.bias_mask.capped != 0;
    if (capped) scale(s, p.scale);
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {  // a loop: the code of each is there once
      if (capped == (turn != 0))
        modify_scores(s, dp, plan.scores, capped || !sums_slopes(), capped);
      else
        add_bias(s, key);
    }
    const int row = warp_row + lane / 4, column = key + lane % 4 * 2;
    apply_mask(s, view, row, column, work.seq_q, work.seq_k);
    if (!all_seen(key)) mask_scores(s, window, row, column);
    load_statistics(statistics);  // again, rather than kept through the softcap
    exponentiate(s, dp, statistics);
    if (sums_slopes()) {
      add_slope_sums(dq, dp, ahead(row, column), [](int n, int e) { return n * 8 + e; });
      return;
    }
    uint32_t ds16[C::kN / 2][C::kM][4];
    pack<Op>(ds16, dp);
    const Span<C::kHeadDim, C::kHeadDim / 16> right(k_rows + lane_by_rows<C::kHeadDim>(), 0);
#pragma unroll
    for (int k = 0; k < C::kN / 2; ++k) multiply_16<Op>(dq, ds16[k], right, k * 16 * T::kRowBytes);
  }

  __device__ __forceinline__ void store() const {
    __syncwarp();  // all lanes have read their rows of Q
    float scale = sums_slopes() ? 1.f : p.scale;
    if constexpr (Drop::kDrops) scale *= dropping.scale;
    if (sums_slopes()) {
      const int64_t head = static_cast<int64_t>(place.batch) * p.heads_q + place.head;
      const int row = warp_row + lane / 4;
      store_slope_sums(dq, scale,
                       static_cast<float*>(p.dbias) + head * p.seq_q + work.first_q + row,
                       work.seq_q - row);
      return;
    }
    store_gradient<Op, C::kHeadDim, false>(
        dq, scale, q_tile + warp * C::kRows * T::kRowBytes, 0,
        static_cast<uint16_t*>(p.dq) + place.offset(p.dq_strides, place.head) +
            static_cast<int64_t>(work.first_q + warp_row) * p.dq_strides.row,
        p.dq_strides.row, work.seq_q - warp_row, p.head_dim, plan.vector_dq);
  }

  __device__ __forceinline__ void run() {
    const int last_row = min(tile_row + C::kBlockQ, work.seq_q) - 1;
    const int keys_begin = window.begin(tile_row), keys_end = window.end(last_row);
    const int first_tile = keys_begin / C::kBlockK;
    const int end_tile =
        keys_begin < keys_end ? (keys_end + C::kBlockK - 1) / C::kBlockK : first_tile;
    set_zero(dq);
    if (first_tile < end_tile) {
      load_queries();
      if (C::kStages == 2) load_keys(first_tile, 0);
      ptx::cp_async_commit();
    }
    int stage = 0;
#pragma unroll 1
    for (int tile = first_tile; tile < end_tile; ++tile) {
      if constexpr (C::kStages == 1) {
        __syncthreads();  // no warp still reads the previous tile
        load_keys(tile, 0);
        ptx::cp_async_commit();
      }
      ptx::cp_async_wait<0>();
      __syncthreads();  // this stage is complete; no warp reads the other one
      if constexpr (C::kStages == 2) {
        if (tile + 1 < end_tile) load_keys(tile + 1, stage ^ 1);
        ptx::cp_async_commit();
      }
#pragma unroll 1
      for (int step = 0; step < C::kBlockK; step += C::kStep) {
        const int key = tile * C::kBlockK + step;
        const uint32_t rows = stage * kStageBytes + step * T::kRowBytes;
        if (any_seen(key)) add_step(k_tile + rows, v_tile + rows, key);
      }
      if (C::kStages == 2) stage ^= 1;
    }
    store();
  }
};

template <class Op, class C, class... Drop>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    backward_queries_kernel(const __grid_constant__ FlashsciBackwardParams p,
                            const __grid_constant__ BackwardPlan plan, uint32_t tiles,
                            Drop... dropout) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<QueryShared<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));

  const TileCoord place(blockIdx.x, tiles, p.heads_q, p);
  TileOfSequence work;
  if (p.cu_seqlens_q != nullptr) {
    work = find_tile<C::kBlockQ>(place.tile, p.cu_seqlens_q, p.cu_seqlens_k, p.num_seqs, p.seq_q,
                                 p.seq_k);
  } else {
    work = {static_cast<int>(p.window_right >= 0 ? tiles - 1 - place.tile : place.tile), 0, p.seq_q,
            0, p.seq_k};
  }
  if (work.tile < 0 || work.tile * C::kBlockQ >= work.seq_q) return;
  int64_t bias_start = 0;
  if (has_ragged_bias(p)) {
    bias_start = ragged_start(p.bias_mask, work.segment - 1, work.first_k, work.seq_q, work.seq_k);
    if (bias_start < 0) work.seq_k = 0;
  }
  using Dropped = Dropping<Drop...>;
  using Warp = QueryWarp<Op, C, Dropped>;
  typename Warp::Sums dq;
  Warp(p, plan, shared, place, work, bias_start, dq, Dropped(dropout...)).run();
}

}  // namespace flashsci::sm80::dq
