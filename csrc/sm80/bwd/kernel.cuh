// Backward attention for tensor cores of the mma.sync generation: dk, dv, and dq in the same pass.
//
// Maths     P = exp(S - lse), dP = dO V^T, dS = P (dP - delta) [times the softcap's slope],
//           dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K; delta = rowsum(dO O) - dlse.
// Roles     One CTA per (key tile, key head, batch), all on grid.x; it goes through the query heads
//           of its key head and the query tiles that see its keys, so dK and dV have one owner. All
//           products are transposed, rows are keys: P^T and dS^T leave their product as left
//           operands of the next. kWarpsK groups of warps own 32 keys each. kWarpsQ = 1 (D <= 64):
//           a group is one warp, with dK and dV of its keys. kWarpsQ = 2: the warps of a group
//           halve the queries of S and dP; then one sums dV, the other dK, over all queries.
//           kWarpsQ = 4: two pairs do the same, for half of the columns each. dQ contracts over all
//           keys of the CTA.
// Shared    K, V (later dK, dV), two stages of Q, dO and row statistics, dS^T for dQ, P^T and dS^T
//           for the partners: `BackwardShared`.
// Pipeline  Two barriers a tile: stage n is complete and n - 1 is free; dS_n is written. Stage n +
//           1 is copied during all of tile n. dQ goes by coalesced red.add to fp32 sums in fragment
//           order (preprocess.cuh reorders them), or, with one key tile, straight to memory.
// Limits    Shared-memory reads, then HMMA issue: docs/develop/kernels/sm80_backward.md.
#pragma once
#include "../../core/poison.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/reduce.cuh"
#include "mainloop.cuh"
#include "scheduler.cuh"

namespace flashsci::sm80::bwd {

// Scores that the window hides become -inf; rows are keys. row: this lane's first key; column: the
// query of its first score.
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

// The warp of calls with neither bias nor mask, and rows that take 16-byte copies.
template <class Op, class C>
struct PlainWarp : KeyTileWarp<Op, C> {
  using Base = KeyTileWarp<Op, C>;
  using Base::k_tile, Base::q_tile, Base::p, Base::plan, Base::lane, Base::warp_k, Base::warp_key;
  using Base::kFromK, Base::kFromQ, Base::kStageBytes, Base::queries, Base::keys, Base::window;
  using typename Base::Dq, typename Base::Operand, typename Base::Scores, typename Base::T;

  const KeyTile<C>& work;
  const TileCoord& place = work.place;
  const SeeingTiles<C> tiles;
  const uint32_t k_left;

  __device__ __forceinline__ PlainWarp(const FlashsciBackwardParams& p_, const BackwardPlan& plan_,
                                       const BackwardShared<C>& shared, const KeyTile<C>& work_,
                                       const Window& window_, typename Base::Sums& sums_)
      : Base(p_, plan_, shared, ptx::redux_max(threadIdx.x / 32), threadIdx.x % 32, window_,
             work_.queries, work_.tile_key(), sums_),
        work(work_),
        tiles(work, window, plan.writes_dq != 0),
        k_left(k_tile + warp_k * C::kKeys * T::kRowBytes + lane_by_rows<C::kHeadDim>(lane)) {}

  template <int kRows>
  __device__ __forceinline__ void load(uint32_t target, const void* data,
                                       const FlashsciStrides& strides, uint32_t head, int row,
                                       int rows_valid, int columns) const {
    load_tile_rows<C, kRows>(target, data, place.offset(strides, head), strides, row, rows_valid,
                             columns, 16, true);
  }
  __device__ __forceinline__ void load_keys() const {
    const int first = work.tile_key(), row = work.first_key + first;
    load<C::kBlockK>(k_tile, p.k, p.k_strides, place.head, row, keys - first, p.head_dim);
    load<C::kBlockK>(k_tile + kFromK, p.v, p.v_strides, place.head, row, keys - first,
                     p.head_dim_v);
  }
  __device__ __forceinline__ void load_queries(int member, int query_tile, int stage) const {
    const uint32_t head = place.head * plan.group + member;
    const uint32_t target = q_tile + stage * kStageBytes;
    const int row = query_tile * C::kBlockQ;
    load<C::kBlockQ>(target, p.q, p.q_strides, head, work.first_query + row, queries - row,
                     p.head_dim);
    load<C::kBlockQ>(target + kFromQ, p.dout, p.dout_strides, head, work.first_query + row,
                     p.dout != nullptr ? queries - row : 0, p.head_dim_v);
    this->load_statistics_tile(
        threadIdx.x, stage, row,
        plan.statistics + (static_cast<int64_t>(place.batch) * p.heads_q + head) * p.seq_q +
            work.first_query + row);
  }

  // P^T and dS^T of a step, packed.
  __device__ __forceinline__ void find_products(Operand& p16, Operand& ds16, uint32_t q_stage,
                                                uint32_t statistics, int step, int query) const {
    Scores s, dp;
    const uint32_t right = q_stage + lane_by_chunks<C::kHeadDim>(lane) + step * T::kRowBytes;
    set_zero(s);
    multiply_rows<Op, C::kHeadDim>(s, k_left, right);
    this->start_dp(dp, statistics);
    multiply_rows<Op, C::kHeadDim>(dp, k_left + kFromK, right + kFromQ);
    modify_scores(s, dp, plan.scores);
    if (!this->all_seen(query))
      mask_scores_transposed(s, window, warp_key + lane / 4, query + lane % 4 * 2);
    this->exponentiate(s, statistics);
    multiply_elements(dp, s);
    pack<Op>(p16, s);
    pack<Op>(ds16, dp);
  }

  __device__ __forceinline__ void finish_dq(int member, int query_tile) const {
    Dq dq;
    this->multiply_dq(dq, lane);
    const uint32_t head = place.head * plan.group + member;
    if (plan.writes_dq) {
      const int row = this->dq_row(query_tile);
      this->write_dq(dq,
                     static_cast<uint16_t*>(p.dq) + place.offset(p.dq_strides, head) +
                         (work.first_query + row) * p.dq_strides.row,
                     row);
    } else {
      const int64_t slot =
          (static_cast<int64_t>(place.batch) * p.heads_q + head) * plan.query_slots +
          work.first_slot() + query_tile;
      this->add_dq(dq, plan.dq_sums + slot * (C::kBlockQ * C::kHeadDim), lane);
    }
  }

  __device__ __forceinline__ void store() const {
    const int64_t row = work.first_key + warp_key;
    const auto rows = [&](void* data, const FlashsciStrides& strides) {
      return static_cast<uint16_t*>(data) + place.offset(strides, place.head) + row * strides.row;
    };
    if (this->has_dv()) this->template store_dv<false>(rows(p.dv, p.dv_strides));
    if (this->has_dk()) this->template store_dk<false>(rows(p.dk, p.dk_strides));
  }

  __device__ __forceinline__ void run() {
    if (tiles.begin < tiles.end) {
      load_keys();
      if (C::kStages == 2) load_queries(0, tiles.begin, 0);
      ptx::cp_async_commit();
    }
    int stage = 0;
#pragma unroll 1
    for (int member = 0, query_tile = tiles.begin; member < plan.group && query_tile < tiles.end;) {
      const bool last = query_tile + 1 == tiles.end;
      const int next_member = last ? member + 1 : member;
      const int next_tile = last ? tiles.begin : query_tile + 1;
      if constexpr (C::kStages == 1) {
        __syncthreads();  // no warp still reads the previous tile
        load_queries(member, query_tile, 0);
        ptx::cp_async_commit();
      }
      ptx::cp_async_wait<0>();
      __syncthreads();  // this stage is complete; no warp reads the other one, P or dS
      if constexpr (C::kStages == 2) {
        if (next_member < plan.group) load_queries(next_member, next_tile, stage ^ 1);
        ptx::cp_async_commit();
      }
      const uint32_t q_stage = q_tile + stage * kStageBytes;
#pragma unroll 1
      for (int step = this->first_step(); step < this->end_step(); step += C::kStep) {
        const int query = query_tile * C::kBlockQ + step;
        const bool active = this->any_seen(query);
        Operand p16, ds16;
        if (active) {
          find_products(p16, ds16, q_stage, this->statistics_of(stage, step), step, query);
        } else {
          this->clear(p16);
          this->clear(ds16);
        }
        this->share_products(p16, ds16, step);
        if (active) this->add_own(p16, ds16, q_stage, step);
      }
      __syncthreads();  // dS and P are written
      this->add_partners(q_stage);
      if (plan.adds_dq || plan.writes_dq) finish_dq(member, query_tile);
      member = next_member;
      query_tile = next_tile;
      if (C::kStages == 2) stage ^= 1;
    }
    __syncthreads();  // no warp still reads K
    store();
  }
};

template <class Op, class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    backward_kernel(const __grid_constant__ FlashsciBackwardParams p,
                    const __grid_constant__ BackwardPlan plan, uint32_t tiles) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<BackwardShared<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));

  const KeyTile<C> work(p, tiles);
  if (plan.writes_dq && work.zero_rows > 0) {
    for (int member = 0; member < plan.group; ++member)
      zero_rows(static_cast<uint16_t*>(p.dq) +
                    work.place.offset(p.dq_strides, work.place.head * plan.group + member) +
                    work.first_query * p.dq_strides.row,
                p.dq_strides.row, work.zero_rows, p.head_dim, C::kThreads);
  }
  if (!work.exists()) return;
  Window window(p.window_left, p.window_right, p.lower_right != 0, work.queries, work.keys);
  window.before = ptx::redux_max(window.before);
  window.after = ptx::redux_max(window.after);
  typename PlainWarp<Op, C>::Sums sums;
  PlainWarp<Op, C>(p, plan, shared, work, window, sums).run();
}

}  // namespace flashsci::sm80::bwd
