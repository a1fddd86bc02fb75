// The forward of kernel.cuh with a bias or a mask.
//
// Maths     As in kernel.cuh, with s_ij + bias_ij before the softmax and -inf for hidden scores;
//           `capped`: with softcap tanh((scale q k^T + bias) / softcap). ALiBi with a mask is a bias
//           that no memory holds. A packed call has a bias of core/ragged_bias.cuh.
// Roles     A unit of work is a query tile of kMembers neighbours along the dimension that shares
//           the bias; a CTA of a packed call has one. Up to D = 64 CTAs are persistent: each takes a run of units, first the tiles,
//           then the other members, so that a bias is read while it is in L2. Every warp works on
//           its rows of all members in turn and starts their scores from the one bias tile that it
//           has converted: S = Q K^T + bias / scale costs nothing beyond the product.
// Shared    Two stages of 32 keys: K and V of every member (interleaved, see core/smem_tile.cuh),
//           the bias tile, one byte a key of each member's key mask; Q of every member, for two
//           units if CTAs are persistent: `BiasMaskStorage` (bias_mask_load.cuh).
// Pipeline  The next stage is copied during the work on the current one, from one unit into the
//           next; one barrier a stage. Q stays in registers if it fits.
// Limits    Issue slots and exponentials at D = 32, HMMA from D = 64 on; a bias that is not shared:
//           HBM.
#pragma once
#include <cuda_runtime.h>
#include <cstddef>

#include "../../core/dropout.cuh"
#include "../../core/mask.cuh"
#include "../../core/poison.cuh"
#include "../../core/smem_tile.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/shared.cuh"
#include "bias_mask_load.cuh"
#include "bias_mask_tile.cuh"
#include "epilogue.cuh"
#include "rows.cuh"
#include "warp_mma.cuh"

namespace flashsci::sm80::fwd {

template <int kM, int kN>
__device__ __forceinline__ void copy(float (&x)[kM][kN][4], const float (&y)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i)
    x[i / (kN * 4)][i / 4 % kN][i % 4] = y[i / (kN * 4)][i / 4 % kN][i % 4];
}

template <int kM, int kN>
__device__ __forceinline__ void add(float (&x)[kM][kN][4], const float (&y)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i)
    x[i / (kN * 4)][i / 4 % kN][i % 4] += y[i / (kN * 4)][i / 4 % kN][i % 4];
}

// x = factor x + y.
template <int kM, int kN>
__device__ __forceinline__ void scale_and_add(float (&x)[kM][kN][4], float factor,
                                              const float (&y)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) {
    float& of = x[i / (kN * 4)][i / 4 % kN][i % 4];
    of = fmaf(factor, of, y[i / (kN * 4)][i / 4 % kN][i % 4]);
  }
}

// Scores that start from -inf stay there.
template <int kM, int kN>
__device__ __forceinline__ void keep_hidden(float (&s)[kM][kN][4],
                                            const float (&start)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i)
    if (start[i / (kN * 4)][i / 4 % kN][i % 4] == -INFINITY)
      s[i / (kN * 4)][i / 4 % kN][i % 4] = -INFINITY;
}

// The state of a thread through its CTA's run of units.
template <class Op, class C, bool kVector, class Drop>
struct BiasMaskWarp {
  using T = Tile<C::kHeadDim>;
  using Stage = BiasMaskStage<C>;
  static constexpr int kMembers = C::kMembers;
  static constexpr bool kAnything = C::kBias == 0;
  // Whether the call may be packed.
  static constexpr bool kPacks = kAnything && !Drop::kDrops;
  static constexpr int kKeptQ = C::kKeepQ ? C::kHeadDim / 16 : 1;
  using KeptQ = uint32_t[kKeptQ][C::kM][4];  // Q [kRows, D] of a member
  static constexpr int kQBytes = C::kBlockQ * T::kRowBytes;
  static constexpr int kTileBytes = C::kBlockK * T::kRowBytes;

  BiasMaskStorage<C>& shared;
  const FlashsciForwardParams& p;
  const ForwardPlan& plan;
  const BiasMaskPlan& bias_mask;
  const BiasMaskSequence& sequence;
  const Drop dropping;
  const typename Drop::Seed seed = dropping.read_seed();
  const int seq_q = sequence.seq_q, seq_k = sequence.seq_k;
  const int warp = ptx::redux_max(threadIdx.x / 32), lane = threadIdx.x % 32;
  const Window window{kAnything ? p.window_left : -1, kAnything ? p.window_right : -1,
                      p.lower_right != 0, seq_q, seq_k};
  uint32_t unit = blockIdx.x * bias_mask.units + min(blockIdx.x, bias_mask.units_rest);
  const uint32_t end_unit = unit + bias_mask.units + (blockIdx.x < bias_mask.units_rest);
  BiasMaskFetch<C, kVector, kPacks> fetch{shared, sequence, unit, end_unit};
  uint32_t stage = ptx::shared_address(shared.stage);  // the current one

  // The current unit.
  struct Unit {
    const BiasMaskPlace place;  // of the first member
    const int warp_row;
    const KeyTiles<C> tiles;
    const WarpKeys<C> keys;
    const uint8_t* mask;  // of pairs
    uint32_t q_start;     // address for this lane's ldmatrix, first member
  };

  __device__ __forceinline__ void issue_copies() {
    fetch.issue(shared, p, plan, bias_mask, window);
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ Unit start_unit() const {
    const BiasMaskPlace place(unit, kMembers, p, plan, bias_mask);
    const int tile_row = (fetch.is_packed(p) ? sequence.tile : place.tile) * C::kBlockQ;
    const int warp_row = tile_row + warp * C::kRows;
    const KeyTiles<C> tiles(window, tile_row, seq_q);
    const WarpKeys<C> keys(window, warp_row, seq_q);
    const uint8_t* mask = p.bias_mask.mask;
    if (kAnything && mask != nullptr) mask += place.offset(p.bias_mask.mask_strides, place.head);
    return {place,
            warp_row,
            tiles,
            keys,
            mask,
            ptx::shared_address(shared.q[unit % C::kUnitsQ]) + warp * C::kRows * T::kRowBytes +
                T::offset(lane % 16, lane / 16)};
  }
  __device__ __forceinline__ void keep_q(KeptQ (&q)[kMembers], const Unit& work) const {
#pragma unroll
    for (int i = 0; i < kMembers * kKeptQ * C::kM; ++i) {
      const int r = i / (kKeptQ * C::kM), d = i / C::kM % kKeptQ, m = i % C::kM;
      ptx::ldmatrix_x4(q[r][d][m],
                       T::pair_address(work.q_start, d) + r * kQBytes + m * 16 * T::kRowBytes);
    }
  }

  // The members with visible keys in this stage, those with hidden ones, and the masks' words.
  __device__ __forceinline__ void read_key_masks(uint32_t (&words)[kMembers][C::kN / 2],
                                                 bool (&any_shown)[kMembers],
                                                 bool (&any_hidden)[kMembers], bool active,
                                                 uint32_t count) const {
#pragma unroll
    for (int r = 0; r < kMembers; ++r) {
      any_shown[r] = active && r < count;
      any_hidden[r] = false;
      if (bias_mask.key_mask) {
        bool shown;
        read_key_mask<C>(words[r], stage + offsetof(Stage, shown) + r * C::kBlockK, shown,
                         any_hidden[r]);
        any_shown[r] &= shown;
      }
    }
  }
  // The initial scores of all members.
  __device__ __forceinline__ void read_start(float (&c)[C::kM][C::kN][4], const Unit& work,
                                             bool active, int row, int key) const {
    const uint32_t bias_tile = stage + offsetof(Stage, bias);
    if (kAnything && p.bias_mask.bias == nullptr) {
      clear(c);
    } else if (kAnything && has_slopes(p.bias_mask)) {
      clear(c);
      const float slope = slope_of(p.bias_mask, work.place, work.place.head);
      add_alibi<true>(c, slope * bias_mask.bias_factor,
                      row - key + (p.lower_right != 0 ? seq_k - seq_q : 0));
    } else if (C::kBias == 4 || (kAnything && p.bias_mask.bias_is_fp32)) {
      read_bias<Op, C, true>(c, bias_tile + bias_start<C, true>(warp), bias_mask.bias_factor);
    } else {
      read_bias<Op, C, false>(c, bias_tile + bias_start<C, false>(warp), bias_mask.bias_factor);
    }
    if (kAnything && active && work.mask != nullptr && !bias_mask.key_mask)
      hide_bias_mask<C>(c, work.mask, p.bias_mask.mask_strides, bias_mask.aligned_mask != 0, row,
                        key, seq_q, seq_k);
  }
  // S += Q K^T of member r.
  __device__ __forceinline__ void multiply(float (&s)[C::kM][C::kN][4], const KeptQ (&q)[kMembers],
                                           uint32_t q_start, uint32_t k_start, int r) const {
    if constexpr (C::kKeepQ)
      multiply_kept_qk<Op, C>(s, q[r], k_start + r * kTileBytes);
    else
      multiply_qk<Op, C>(s, q_start + r * kQBytes, k_start + r * kTileBytes);
  }
  __device__ __forceinline__ void score(float (&s)[C::kM][C::kN][4],
                                        const float (&c)[C::kM][C::kN][4],
                                        const KeptQ (&q)[kMembers], uint32_t q_start,
                                        uint32_t k_start, int r) const {
    if (!kAnything || plan.scores.mode == kScaled) {
      copy(s, c);
      multiply(s, q, q_start, k_start, r);
    } else {
      clear(s);
      multiply(s, q, q_start, k_start, r);
      const bool capped = p.bias_mask.capped != 0;
      if (capped) scale_and_add(s, p.scale, c);
      scale_scores(s, plan.scores);
      if (capped)
        keep_hidden(s, c);
      else
        add(s, c);
    }
  }
  // A stage: the tile of keys from `first_key` on, member by member.
  __device__ __forceinline__ void step(OutputRows<C> (&rows)[kMembers], const KeptQ (&q)[kMembers],
                                       const Unit& work, int first_key) const {
    const bool active = work.keys.any_seen(first_key);
    const int row = work.warp_row + opaque(lane) / 4, key = first_key + opaque(lane) % 4 * 8;
    uint32_t kept = 0;  // by dropout, drawn before scores need the registers
    if constexpr (Drop::kDrops) {
      static_assert(kMembers == 1, "the stream is that of the first member");
      const uint32_t stream =
          (work.place.batch0 * p.batch1 + work.place.batch1) * p.heads_q + work.place.head;
      kept = dropping.template draw_interleaved_rows<C::kM, C::kN>(seed, stream, row, key);
    }
    uint32_t words[kMembers][C::kN / 2];  // of the key masks
    bool any_shown[kMembers], any_hidden[kMembers];
    read_key_masks(words, any_shown, any_hidden, active, work.place.count);
    float c[C::kM][C::kN][4];
    read_start(c, work, active, row, key);
    const uint32_t k_start = stage + T::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const uint32_t v_start = stage + offsetof(Stage, v) + T::offset(lane % 16, lane / 16);
#pragma unroll
    for (int r = 0; r < kMembers; ++r) {
      if (!any_shown[r]) continue;
      float s[C::kM][C::kN][4];  // [m16, n8 of keys, fragment]: scores, then P
      score(s, c, q, work.q_start, k_start, r);
      if (any_hidden[r]) hide_keys<C>(s, words[r]);
      if (work.keys.any_hidden(first_key)) mask_scores<true>(s, window, row, key);
      online_softmax_lazily(s, rows[r].o, rows[r].row_max, rows[r].row_sum, plan.scores.exp_scale);
      if constexpr (Drop::kDrops) {
        drop(s, 0, kept);
      }
      multiply_pv<Op, C>(rows[r].o, s, v_start + r * kTileBytes);
    }
  }
  __device__ __forceinline__ void write(const OutputRows<C> (&rows)[kMembers], int warp_row) const {
    // Recomputed rather than kept through the loop.
    const BiasMaskPlace home(opaque(unit), kMembers, p, plan, bias_mask);
    auto* out = static_cast<uint16_t*>(p.out) + home.offset(p.out_strides, home.head) +
                (sequence.first_q + warp_row) * p.out_strides.row;
    float* lse = p.lse +
                 ((home.batch0 * p.batch1 + home.batch1) * p.heads_q + home.head) * p.seq_q +
                 sequence.first_q + warp_row;
#pragma unroll
    for (int r = 0; r < kMembers; ++r) {
      if (r >= home.count) break;
      store_rows<Op, C>(rows[r], out + r * bias_mask.out_step, lse + r * bias_mask.lse_step,
                        p.out_strides.row, seq_q - warp_row, p.head_dim_v, plan);
    }
  }

  __device__ __forceinline__ void run() {
    fetch.seek(shared, p, plan, bias_mask, window);
    issue_copies();
#pragma unroll 1
    for (; unit < end_unit; ++unit) {
      const Unit work = start_unit();
      OutputRows<C> rows[kMembers];
#pragma unroll
      for (int r = 0; r < kMembers; ++r) rows[r].reset();
      KeptQ q[kMembers];
#pragma unroll 1
      for (int tile = work.tiles.end - 1; tile >= work.tiles.first; --tile) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // this stage is complete; no warp still reads the previous one
        if (C::kKeepQ && tile == work.tiles.end - 1) {
          keep_q(q, work);
          // The next copies may bring the Q after the next, which takes the place of this one.
          if (tile == work.tiles.first) __syncthreads();
        }
        issue_copies();
        step(rows, q, work, tile * C::kBlockK);
        stage = next_stage<C>(stage, shared);
      }
      if constexpr (Drop::kDrops) rows[0].scale(dropping.scale);
      if (work.warp_row < seq_q) write(rows, work.warp_row);
    }
  }
};

template <class Op, class C, bool kVector, class... Drop>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    forward_bias_mask_kernel(const __grid_constant__ FlashsciForwardParams p,
                             const __grid_constant__ ForwardPlan plan,
                             const __grid_constant__ BiasMaskPlan bias_mask, Drop... dropout) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<BiasMaskStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));
  using Dropped = Dropping<Drop...>;
  using Warp = BiasMaskWarp<Op, C, kVector, Dropped>;
  BiasMaskSequence sequence(p);
  if constexpr (Warp::kPacks) {
    if (p.cu_seqlens_q != nullptr) {  // then a CTA has one unit
      const BiasMaskPlace place(blockIdx.x, C::kMembers, p, plan, bias_mask);
      if (!sequence.find<C>(place.tile, p)) return;
    }
  }
  Warp{shared, p, plan, bias_mask, sequence, Dropped(dropout...)}.run();
}

}  // namespace flashsci::sm80::fwd
