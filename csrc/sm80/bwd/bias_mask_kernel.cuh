// The backward of kernel.cuh with a bias or a mask, or with rows that take no 16-byte copies.
//
// Maths     As in kernel.cuh, with the bias (or ALiBi's) added to S, before a softcap if `capped`, and
//           -inf for hidden scores; dS is also the gradient of a bias that has an element for every
//           pair. Packed calls: core/ragged_bias.cuh. With dropout P of dV, and dP, are 0 or divided by 1 - p.
// Roles     As in kernel.cuh. Keys are assigned to the rows of a warp so that a lane has neighbours
//           (bias_mask.cuh).
// Shared    As in kernel.cuh, plus all pointers: the loop has no registers for them
//           (scheduler.cuh).
// Pipeline  As in kernel.cuh; the bias and a mask of keys come one step ahead, in registers.
// Limits    Registers: docs/develop/kernels/sm80_backward.md.
#pragma once
#include <cstddef>

#include "../../core/dropout.cuh"
#include "../../core/poison.cuh"
#include "bias_mask.cuh"
#include "mainloop.cuh"
#include "scheduler.cuh"

namespace flashsci::sm80::bwd {

template <class C>
struct BackwardBiasMaskShared {
  BackwardShared<C> tiles;
  KeyTileWork work;
};

// A tile of K or V, with its rows in the order of row_of_key; once per CTA.
template <class C>
__device__ __forceinline__ void load_keys(uint32_t tile, const uint16_t* __restrict__ global,
                                          int64_t row_stride, int rows_valid, int cols_valid,
                                          int copy_bytes, bool vector) {
  using T = Tile<C::kHeadDim>;
#pragma unroll 4
  for (int i = threadIdx.x; i < C::kBlockK * T::kChunks; i += C::kThreads) {
    const int key = i / T::kChunks, chunk = i % T::kChunks;
    const uint32_t target = tile + T::offset(row_of_key<C::kM>(key), chunk);
    const uint16_t* source = global + key * row_stride + chunk * kChunkElements;
    const int columns = key < rows_valid ? cols_valid - chunk * kChunkElements : 0;
    poison_chunk(target);
    if (vector)
      ptx::cp_async_16(target, source, columns > 0);
    else
      load_chunk(target, source, min(columns, kChunkElements), copy_bytes);
  }
}

// The warp of calls with a bias, a mask, dropout, or rows of any alignment.
template <class Op, class C, class Drop>
struct BiasMaskWarp : KeyTileWarp<Op, C> {
  using Base = KeyTileWarp<Op, C>;
  using Ahead = BiasMaskAhead<Op, C::kM, C::kN>;
  using Base::k_tile, Base::q_tile, Base::p, Base::plan, Base::lane, Base::warp_k, Base::warp_key;
  using Base::kFromK, Base::kFromQ, Base::kStageBytes, Base::queries, Base::keys, Base::window;
  using typename Base::Dq, typename Base::Operand, typename Base::Scores, typename Base::T;

  const KeyTileWork& work;  // and its shared address, for `kept`
  const uint32_t record = k_tile + offsetof(BackwardBiasMaskShared<C>, work);
  const int first_tile;
  const bool any;  // whether query tiles see keys of the CTA
  Ahead& ahead;
  const Drop dropping;
  const uint32_t stream;  // of the first member, for dropout

  __device__ __forceinline__ BiasMaskWarp(const FlashsciBackwardParams& p_,
                                          const BackwardPlan& plan_,
                                          const BackwardBiasMaskShared<C>& shared, int warp_,
                                          int lane_, const Window& window_,
                                          typename Base::Sums& sums_, Ahead& ahead_,
                                          const Drop& dropping_, uint32_t stream_)
      : Base(p_, plan_, shared.tiles, warp_, lane_, window_, ptx::redux_max(shared.work.queries),
             ptx::redux_max(shared.work.tile_key), sums_),
        work(shared.work),
        first_tile(ptx::redux_max(work.first_tile)),
        any(first_tile < ptx::redux_max(work.end_tile)),
        ahead(ahead_),
        dropping(dropping_),
        stream(stream_) {}

  // The next query tile of the same member, or the first one of the next.
  __device__ __forceinline__ void advance(int& member, int& query_tile) const {
    const uint64_t ends = ptx::ld_shared_u64(record + offsetof(KeyTileWork, first_tile));
    const bool last = query_tile + 1 == static_cast<int>(ends >> 32);
    query_tile = last ? static_cast<int>(ends) : query_tile + 1;
    member += last;
  }
  // This lane's first key and column in its fragments.
  __device__ __forceinline__ int first_key() const { return warp_key + lane / 4 * (2 * C::kM); }
  __device__ __forceinline__ int first_column(int query) const { return query + lane % 4 * 2; }

  __device__ __forceinline__ void load_keys() const {
    const int rows = keys - (warp_key - warp_k * C::kKeys);
    const bool vector = plan.vector != 0;
    bwd::load_keys<C>(k_tile, work.k, p.k_strides.row, rows, p.head_dim, p.copy_bytes, vector);
    bwd::load_keys<C>(k_tile + kFromK, work.v, p.v_strides.row, rows, p.head_dim_v, p.copy_bytes,
                      vector);
  }
  __device__ __forceinline__ void load_queries(int member, int query_tile, int stage) const {
    const int row = query_tile * C::kBlockQ;
    const uint32_t target = q_tile + stage * kStageBytes;
    load_tile_rows<C, C::kBlockQ>(target, kept<const uint16_t>(record + offsetof(KeyTileWork, q)),
                                  member * p.q_strides.head, p.q_strides, row, queries - row,
                                  p.head_dim, p.copy_bytes, plan.vector);
    load_tile_rows<C, C::kBlockQ>(
        target + kFromQ, kept<const uint16_t>(record + offsetof(KeyTileWork, dout)),
        member * p.dout_strides.head, p.dout_strides, row, p.dout != nullptr ? queries - row : 0,
        p.head_dim_v, p.copy_bytes, plan.vector);
    this->load_statistics_tile(opaque(threadIdx.x), stage, row,
                               kept<const float2>(record + offsetof(KeyTileWork, statistics)) +
                                   member * int64_t{p.seq_q} + row);
  }

  __device__ __forceinline__ const unsigned char* bias_of(int member) const {
    return kept<const unsigned char>(record + offsetof(KeyTileWork, bias)) +
           member * p.bias_mask.bias_strides.head * (p.bias_mask.bias_is_fp32 ? 4 : 2);
  }
  __device__ __forceinline__ const uint8_t* mask_of(int member) const {
    return kept<const uint8_t>(record + offsetof(KeyTileWork, mask)) +
           member * p.bias_mask.mask_strides.head;
  }
  __device__ __forceinline__ void load_ahead(int member, int query) {
    ahead.load(p.bias_mask, plan, bias_of(member), mask_of(member), first_column(query),
               first_key(), member < plan.group ? queries : 0, member < plan.group ? keys : 0);
  }
  __device__ __forceinline__ void load_ahead_of_next(int member, int query_tile, int step) {
    int next_member = member, next_query = query_tile * C::kBlockQ + step + C::kStep;
    if (step + C::kStep >= this->end_step()) {
      int next_tile = query_tile;
      advance(next_member, next_tile);
      next_query = next_tile * C::kBlockQ + this->first_step();
    }
    load_ahead(next_member, next_query);
  }
  __device__ __forceinline__ void write_bias_gradient(const Scores& ds, int member,
                                                      int query) const {
    unsigned char* dbias = kept<unsigned char>(record + offsetof(KeyTileWork, dbias)) +
                           member * p.dbias_strides.head * (p.bias_mask.bias_is_fp32 ? 4 : 2);
    store_bias_gradient<Op>(ds, dbias, p.bias_mask.bias_is_fp32 != 0, plan.dbias_vector != 0,
                            row_of_pairs(p.dbias_strides, plan.ragged, keys), first_column(query),
                            first_key(), queries, keys);
  }

  // Softcap, or scale, and the bias, in this order or, if `capped`, the other one. A loop: the code
  // of each is there once.
  __device__ __forceinline__ void cap_and_add(Scores& s, Scores& dp, int member, int query,
                                              int distance) const {
    const bool capped = p.bias_mask.capped != 0;
    if (capped) scale(s, p.scale);
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (capped == (turn != 0))
        modify_scores(s, dp, plan.scores, true, capped);
      else
        Ahead::add_late(s, p.bias_mask, plan, bias_of(member), first_column(query), first_key(),
                        queries, keys, distance);
    }
  }
  // P^T and dS^T of a step, packed.
  __device__ __forceinline__ void find_products(Operand& p16, Operand& ds16, uint32_t q_stage,
                                                uint32_t statistics, int step, int member,
                                                int query) const {
    uint32_t kept = 0;
    if constexpr (Drop::kDrops)
      kept = dropping.template draw_neighbours<C::kM, C::kN>(dropping.read_seed(), stream + member,
                                                             first_column(query), first_key());
    Scores s, dp;
    // opaque: an address in a register through the loop costs too much.
    const uint32_t k_left =
        k_tile + warp_k * C::kKeys * T::kRowBytes + lane_by_rows<C::kHeadDim>(opaque(lane));
    const uint32_t right = q_stage + lane_by_chunks<C::kHeadDim>(lane) + step * T::kRowBytes;
    const int distance =
        first_column(query) - first_key() + (p.lower_right != 0 ? keys - queries : 0);
    ahead.start(s, p.bias_mask, plan, distance);
    multiply_rows<Op, C::kHeadDim>(s, k_left, right);
    this->start_dp(dp, statistics);
    multiply_rows<Op, C::kHeadDim>(dp, k_left + kFromK, right + kFromQ);
    if constexpr (Drop::kDrops) drop_gradients(dp, kept, statistics);
    if (plan.scores.mode != kScaled) cap_and_add(s, dp, member, query, distance);
    ahead.hide(s, p.bias_mask, plan, mask_of(member), first_column(query), first_key(), queries,
               keys);
    if (!this->all_seen(query))
      mask_transposed(s, window, opaque(first_key()), first_column(query));
    this->exponentiate(s, statistics);
    if constexpr (Drop::kDrops)
      drop_probabilities(s, dp, kept, dropping.scale);
    else
      multiply_elements(dp, s);
    if (plan.writes_bias) write_bias_gradient(dp, member, query);
    pack<Op>(p16, s);
    pack<Op>(ds16, dp);
  }

  __device__ __forceinline__ void finish_dq(int member, int query_tile) const {
    Dq dq;
    this->multiply_dq(dq, opaque(lane));
    if (plan.writes_dq) {
      const int row = this->dq_row(query_tile);
      this->write_dq(dq,
                     kept<uint16_t>(record + offsetof(KeyTileWork, dq)) +
                         member * p.dq_strides.head + row * p.dq_strides.row,
                     row);
    } else {
      const int64_t slot = int64_t{member} * plan.query_slots + query_tile;
      this->add_dq(
          dq,
          kept<float>(record + offsetof(KeyTileWork, dq_sums)) + slot * (C::kBlockQ * C::kHeadDim),
          opaque(threadIdx.x) % 32);
    }
  }

  __device__ __forceinline__ void store() const {
    const int row = warp_k * C::kKeys;
    if (this->has_dv()) this->template store_dv<true>(work.dv + row * p.dv_strides.row);
    if (this->has_dk()) this->template store_dk<true>(work.dk + row * p.dk_strides.row);
  }

  __device__ __forceinline__ void run() {
    if (any) {
      load_keys();
      if (C::kStages == 2) load_queries(0, first_tile, 0);
      ptx::cp_async_commit();
    }
    load_ahead(any ? 0 : plan.group, first_tile * C::kBlockQ + this->first_step());
    int stage = 0;
#pragma unroll 1
    for (int member = 0, query_tile = first_tile; any && member < plan.group;) {
      if constexpr (C::kStages == 1) {
        __syncthreads();  // no warp still reads the previous tile
        load_queries(member, query_tile, 0);
        ptx::cp_async_commit();
      }
      ptx::cp_async_wait<0>();
      __syncthreads();  // this stage is complete; no warp reads the other one, P or dS
      if constexpr (C::kStages == 2) {
        int next_member = member, next_tile = query_tile;
        advance(next_member, next_tile);
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
          find_products(p16, ds16, q_stage, this->statistics_of(stage, step), step, member, query);
        } else {
          this->clear(p16);
          this->clear(ds16);
        }
        this->share_products(p16, ds16, step);
        if (active) this->add_own(p16, ds16, q_stage, step);
        load_ahead_of_next(member, query_tile, step);
      }
      __syncthreads();  // dS and P are written
      this->add_partners(q_stage);
      if (plan.adds_dq || plan.writes_dq) finish_dq(member, query_tile);
      advance(member, query_tile);
      if (C::kStages == 2) stage ^= 1;
    }
    __syncthreads();  // no warp still reads K
    store();
  }
};

template <class Op, class C, class... Drop>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    backward_bias_mask_kernel(const __grid_constant__ FlashsciBackwardParams p,
                              const __grid_constant__ BackwardPlan plan, uint32_t tiles,
                              Drop... dropout) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<BackwardBiasMaskShared<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));

  const int warp = ptx::redux_max(threadIdx.x / 32);
  // Shuffled, so that it is kept in a register: the special register takes long to read.
  const int lane = __shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x % 32);
  if (warp == 0) shared.work.template find<C>(p, plan, tiles);
  __syncthreads();
  if (plan.writes_dq && shared.work.zero_rows > 0) {
    for (int member = 0; member < plan.group; ++member)
      zero_rows(shared.work.dq + member * p.dq_strides.head, p.dq_strides.row,
                shared.work.zero_rows, p.head_dim, C::kThreads);
  }
  if (shared.work.keys <= 0) return;
  const Window window(ptx::redux_max(shared.work.before), ptx::redux_max(shared.work.after),
                      ptx::redux_max(shared.work.keys));
  using Dropped = Dropping<Drop...>;
  using Warp = BiasMaskWarp<Op, C, Dropped>;
  typename Warp::Sums sums;
  typename Warp::Ahead ahead;
  uint32_t stream = 0;
  if constexpr (Dropped::kDrops) {
    const KeyTile<C> found(p, tiles);
    const uint32_t entry = p.cu_seqlens_q != nullptr ? found.segment - 1 : found.place.batch;
    stream = ptx::redux_max(entry * p.heads_q + found.place.head * plan.group);
  }
  Warp(p, plan, shared, warp, lane, window, sums, ahead, Dropped(dropout...), stream).run();
}

}  // namespace flashsci::sm80::bwd
