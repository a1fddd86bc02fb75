// A consumer warpgroup of the sm90 forward: 64 query rows of tile after tile, from S to the stores.
//
// `Consumer::run` is the loop over tiles, `step` the work on a block of keys. Blocks come from
// right to left; S of a block is issued together with P V of the previous block, across tiles too.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../../ptx/bulk.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../../ptx/wgmma.cuh"
#include "bias_mask.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "overflow.cuh"
#include "softmax.cuh"

namespace flashsci::sm90::fwd {

// Hardware barriers, each one for every consumer; 0 belongs to __syncthreads.
enum NamedBarrier {
  kPingpong = 1,         // + w: consumer w may issue its products
  kRowsInitialized = 8,  // + w: the warps of consumer w compare the keys they have seen
};

template <class Op, class C, bool kWindowed, bool kPlainScores, bool kVarlen>
struct Consumer {
  static constexpr int kBlockK = C::kBlockK, kStages = C::kStages;
  static constexpr int kHeadDim = C::kHeadDim, kHeadDimV = C::kHeadDimV;
  // One loop over masked and whole blocks, all of which search for the maximum: two loops spill.
  static constexpr bool kOneLoop = kHeadDim > 128 && !kPlainScores && !C::kHasBiasMask;
  static constexpr bool kHalfBlocks = kBlockK > 32;  // a first block of half width
  // A 16-bit bias is fetched while its scores are computed (measured).
  static constexpr bool kFetchEarly = C::kHasBiasMask && (kHeadDim == 32 || kHeadDim == 128);
  using MmaQK = typename Op::template Wgmma<kBlockK>;
  using MmaQKHalf = typename Op::template Wgmma<kHalfBlocks ? kBlockK / 2 : kBlockK>;
  using MmaPV = typename Op::template Wgmma<kHeadDimV>;

  SharedStorage<C>& shared;
  const ForwardArgs& a;
  const int w;                      // the consumer
  const int lane, warp_row;         // the warp's first row in the tile
  const int row_in_tile;            // this lane's first row
  uint64_t q_desc, k_desc, v_desc;  // of the first stages

  float s[kBlockK / 2];         // scores, then P
  float o[kHeadDimV / 2];       // output, unnormalised
  uint32_t p[kBlockK / 16][4];  // P as operand, per 16 keys
  RowStatistics rows;
  float alpha[2];
  BiasMaskRing ring;
  uint32_t bias_place = 0;  // of the current tile: place_on_lattice
  uint32_t head = 0;        // K blocks done: they give stage and phase of the next
  uint32_t tiles = 0;       // tiles done
  uint32_t accumulate = 0;  // 0: O counts as cleared
  bool pending = false;  // P of block head - 1 waits for its product, a tile's output for its end

  // Of the current tile.
  struct Work {
    const TileInfo& info;
    int row, seq_q, seq_k;     // of `info`, uniform
    Blocks<C> own;             // blocks that this consumer's rows see
    int full_begin, full_end;  // keys that all of its rows see
    int block;
  };

  __device__ __forceinline__ Consumer(SharedStorage<C>& shared_, const ForwardArgs& a_, int w_)
      : shared(shared_),
        a(a_),
        w(w_),
        lane(threadIdx.x % 32),
        warp_row(w * 64 + threadIdx.x / 32 % 4 * 16),
        row_in_tile(warp_row + lane / 4),
        q_desc(ptx::wgmma_descriptor(ptx::shared_address(shared.q[0][w]), 16, 1024)),
        k_desc(ptx::wgmma_descriptor(ptx::shared_address(shared.k), 16, 1024)),
        v_desc(ptx::wgmma_descriptor(ptx::shared_address(shared.v), kBlockK * 128, 1024)) {}

  // --- barriers

  __device__ __forceinline__ void release(uint64_t& barrier) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  }
  __device__ __forceinline__ void wait(uint64_t& barrier, uint32_t parity) const {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), parity & 1);
  }
  __device__ __forceinline__ void wait_k() const {
    wait(shared.k_full[head % kStages], head / kStages);
  }
  __device__ __forceinline__ void wait_v(uint32_t at) const {
    wait(shared.v_full[at % kStages], at / kStages);
  }
  // The consumers issue in turn: one warpgroup waits, one arrives.
  __device__ __forceinline__ void pingpong_wait() const { ptx::barrier_sync(kPingpong + w, 256); }
  __device__ __forceinline__ void pingpong_arrive() const {
    ptx::barrier_arrive(kPingpong + (w + 1) % C::kConsumers, 256);
  }
  // Skips blocks that this warpgroup's rows do not see; the producer arrives for them.
  __device__ __forceinline__ void skip(int count) {
    head += count;
#pragma unroll 1
    for (; count > 0; --count) {
      pingpong_wait();
      pingpong_arrive();
      if constexpr (C::kHasBiasMask) ring.next(a.bias_mask);
    }
  }

  // --- products

  // scores = Q K^T
  template <class Mma, int kCount>
  __device__ __forceinline__ void issue_qk(float (&scores)[kCount]) {
    const uint64_t q_tile = q_desc + tiles % C::kQStages * (C::kConsumers * C::kQBytes / 16);
    const uint64_t k_tile = k_desc + head % kStages * (C::kKBytes / 16);
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d)
      Mma::template ss<0>(scores, q_tile + (d / 4 * 8192 + d % 4 * 32) / 16,
                          k_tile + (d / 4 * kBlockK * 128 + d % 4 * 32) / 16, d > 0);
    ptx::wgmma_commit();
  }
  // O += P V
  __device__ __forceinline__ void issue_pv(uint32_t at) {
    const uint64_t v_tile = v_desc + at % kStages * (C::kVBytes / 16);
#pragma unroll
    for (int n = 0; n < kBlockK / 16; ++n)
      MmaPV::template rs<1>(o, p[n], v_tile + n * (2048 / 16), n > 0 ? 1 : accumulate);
    ptx::wgmma_commit();
    accumulate = 1;
  }
  // The scores of the block's first `kCount` elements become P; the rest of P is 0.
  template <int kCount>
  __device__ __forceinline__ void pack(const float (&scores)[kCount]) {
#pragma unroll
    for (int e = 0; e < kBlockK / 2; e += 2)
      p[e / 8][e / 2 % 4] = e < kCount ? Op::pack2(scores[e % kCount], scores[e % kCount + 1]) : 0;
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int e = 0; e < kHeadDimV / 2; ++e) o[e] = 0.f;
  }
  __device__ __forceinline__ void rescale_output() {
#pragma unroll
    for (int e = 0; e < kHeadDimV / 2; ++e) o[e] *= alpha[e >> 1 & 1];
  }

  // --- scores

  __device__ __forceinline__ uint32_t bias_mask_stage() const {
    if constexpr (C::kHasBiasMask)
      return ptx::shared_address(shared.bias_mask) + ring.stage * a.bias_mask.stage_bytes;
    return 0;
  }
  template <int kWords>
  __device__ __forceinline__ void fetch_bias(uint32_t (&words)[kWords]) const {
    fetch_16_bit<C>(words, a.bias_mask, bias_mask_stage() + w * a.bias_mask.bias_step, bias_place);
  }
  template <int kWords>
  __device__ __forceinline__ void wait_bias_mask(uint32_t (&words)[kWords]) const {
    if constexpr (C::kHasBiasMask) wait(shared.bias_mask_full[ring.stage], ring.phase);
    if constexpr (kFetchEarly) fetch_bias(words);
  }
  template <int kCount, int kWords>
  __device__ __forceinline__ void add_bias_mask(float (&scores)[kCount],
                                                uint32_t (&words)[kWords]) {
    const FlashsciBiasMask& given = a.p.bias_mask;
    const bool scaled = a.scores.mode == kSoftcap || given.bias == nullptr;
    if (scaled) scale_scores(scores, a.scores);
    const float inner = scaled ? 1.f : a.scores.inner;
    if (given.bias != nullptr && given.bias_is_fp32) {
      add_fp32<C>(scores, a.bias_mask, inner, bias_mask_stage() + w * a.bias_mask.bias_step,
                  bias_place);
    } else if (given.bias != nullptr) {
      if constexpr (!kFetchEarly) fetch_bias(words);
      add_16_bit<Op>(scores, words, inner);
    }
    if (given.mask != nullptr)
      hide<kBlockK>(scores, a.bias_mask,
                    bias_mask_stage() + a.bias_mask.mask + w * a.bias_mask.mask_step);
    release(shared.bias_mask_empty[ring.stage]);
    ring.next(a.bias_mask);
  }
  // The arguments of the exponentials, from q.k.
  template <int kCount, int kWords>
  __device__ __forceinline__ void modify_scores(float (&scores)[kCount],
                                                uint32_t (&words)[kWords]) {
    if constexpr (C::kHasBiasMask)
      add_bias_mask(scores, words);
    else if constexpr (!kPlainScores)
      scale_scores(scores, a.scores);
  }
  // Recomputed for each mask: registers are scarce.
  __device__ __forceinline__ Window window(const Work& work) const {
    return kVarlen ? window_of(a.p, work.info.seq_q, work.info.seq_k)
                   : window_of(a.p, a.p.seq_q, a.p.seq_k);
  }
  template <int kBegin, int kEnd, int kCount>
  __device__ __forceinline__ void mask_elements(float (&scores)[kCount], const Work& work) const {
    const Window seen = window(work);
    const int first_key = work.block * kBlockK, column = first_key + lane % 4 * 2;
    const int row = work.info.row + row_in_tile;
    if (first_key + kEnd * 2 > work.full_end)
      mask_scores<kBegin, kEnd, false>(scores, seen, row, column);
    if (kWindowed && first_key + kBegin * 2 < work.full_begin)
      mask_scores<kBegin, kEnd, true>(scores, seen, row, column);
  }
  __device__ __forceinline__ void mask_block(const Work& work) {
    mask_elements<0, kBlockK / 4>(s, work);
    mask_elements<kBlockK / 4, kBlockK / 2>(s, work);
  }
  // Whether the maximum must be searched for: although blocks are whole, bias or mask may have
  // hidden all keys of a row so far.
  __device__ __forceinline__ bool rows_uninitialized(const Work& work) const {
    if constexpr (C::kOptimistic) {
      const int row = work.row + row_in_tile;
      const bool found = (rows.row_max_log2[0] != kUninitializedMax || row >= work.seq_q) &&
                         (rows.row_max_log2[1] != kUninitializedMax || row + 8 >= work.seq_q);
      return ptx::redux_max(!ptx::barrier_all(kRowsInitialized + w, 128, found));
    }
    return false;
  }

  // --- tiles

  __device__ __forceinline__ void write(const RowStatistics& of, const TileInfo& tile) {
    write_output<Op, C, kVarlen>(o, of, a, tile, kVarlen ? tile.seq_q : a.p.seq_q, warp_row,
                                 shared.staging[warp_row / 16]);
  }
  // The pending last product of the tile, and its output.
  __device__ __forceinline__ void finish(uint32_t tile) {
    const uint32_t at = head - 1;
    wait_v(at);
    ptx::wgmma_fence();
    issue_pv(at);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(o);
    release(shared.v_empty[at % kStages]);
    write(rows, shared.tile_info[tile % kTileSlots]);
    pending = false;
  }
  __device__ __forceinline__ void release_k(const Work& work) {
    release(shared.k_empty[head % kStages]);
    if (work.block == work.own.first) release(shared.q_empty[tiles % C::kQStages][w]);
  }
  // The first block of a tile, of which `scores` are all or the first half, together with the last
  // product of the previous tile, whose V is in `pending_v`.
  template <class Mma, int kCount>
  __device__ __forceinline__ void first_block(float (&scores)[kCount], const Work& work,
                                              uint32_t pending_v) {
    issue_qk<Mma>(scores);
    if constexpr (C::kQStages > 1) {
      if (pending) wait_v(pending_v);
      issue_pv(pending_v);  // no-op if nothing is pending; a branch would serialise wgmma (C7520)
    }
    pingpong_arrive();
    uint32_t words[kCount / 2];
    wait_bias_mask(words);
    ptx::wgmma_wait<(C::kQStages > 1)>();
    ptx::wgmma_tie(scores);
    release_k(work);
    modify_scores(scores, words);
    mask_elements<0, kBlockK / 4>(scores, work);
    if constexpr (kCount > kBlockK / 4) mask_elements<kBlockK / 4, kBlockK / 2>(scores, work);
    softmax_first(scores, rows, a.scores.exp_scale);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(o);
    if (pending) release(shared.v_empty[pending_v % kStages]);
    pack(scores);
  }
  // Searches for the maximum first.
  template <bool kMasked, class PvDone>
  __device__ __forceinline__ void softmax_careful(const Work& work, const PvDone& pv_done) {
    if constexpr (kMasked) {
      const int first_key = work.block * kBlockK;
      if (!kOneLoop || first_key + kBlockK > work.full_end || first_key < work.full_begin)
        mask_block(work);
    }
    const bool grew = softmax_next(s, rows, alpha, a.scores.exp_scale);
    pv_done();
    if (grew) rescale_output();
    pack(s);
  }
  // Does not search for the maximum first: it hardly moves, and overflow shows in the sums.
  template <class PvDone>
  __device__ __forceinline__ void softmax_optimistic(const Work& work, const PvDone& pv_done) {
    float part[4];
    if constexpr (C::kEarly > 0) {
      exponentials<false, 0, C::kEarly>(s, rows.row_max_log2, a.scores.exp_scale, part);
      ptx::schedule_fence(part[3]);
    }
    pv_done();
    // Otherwise ptxas releases V last, and with two stages the next V comes late.
    if constexpr (C::kQStages == 1) ptx::schedule_fence(a.p.seq_k);
    exponentials<false, C::kEarly, kBlockK / 2>(s, rows.row_max_log2, a.scores.exp_scale, part);
    float sum[2] = {part[0] + part[1], part[2] + part[3]};
    pack(s);
    if (__any_sync(0xffffffffu, sum[0] > kOverflow || sum[1] > kOverflow)) {
      if (__any_sync(0xffffffffu, sum[0] > kRecomputeAbove || sum[1] > kRecomputeAbove)) {
        const int row = work.info.row + row_in_tile, key = work.block * kBlockK;
        // Not unrolled if it is long.
        recompute_scores<Op, C::kHasBiasMask ? 1 : kBlockK / 8>(
            s, a, work.info, row, work.seq_q, key, [&](auto& c, int n) {
              if constexpr (C::kHasBiasMask)
                add_bias_mask_again<Op>(c, a, work.info, row, key + n * 8 + lane % 4 * 2);
            });
        sum[0] = sum[1] = 0.f;
        alpha[0] = alpha[1] = 1.f;
        softmax_next(s, rows, alpha, a.scores.exp_scale);
      } else {
        follow_growth(s, rows, sum, alpha);
      }
      rescale_output();
      pack(s);
    }
    rows.sum[0] += sum[0];
    rows.sum[1] += sum[1];
  }
  // A block, together with the product of the previous block.
  template <bool kMasked>
  __device__ __forceinline__ void step(const Work& work) {
    wait_k();
    pingpong_wait();
    ptx::wgmma_fence();
    issue_qk<MmaQK>(s);
    const uint32_t at = head - 1;
    wait_v(at);
    if constexpr (kOneLoop) ptx::wgmma_fence();  // or ptxas adds one, and waits for every product
    issue_pv(at);
    pingpong_arrive();
    uint32_t words[kBlockK / 4];
    wait_bias_mask(words);
    ptx::wgmma_wait<1>();
    ptx::wgmma_tie(s);
    release_k(work);
    modify_scores(s, words);
    const auto pv_done = [&] {
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(o);
      release(shared.v_empty[at % kStages]);
    };
    if constexpr (kMasked || (!kPlainScores && !C::kOptimistic))
      softmax_careful<kMasked>(work, pv_done);
    else
      softmax_optimistic(work, pv_done);
    ++head;
  }
  // Masked blocks on the right, then whole ones, then masked ones on the left. Every row has seen a
  // key before the first whole block.
  __device__ __forceinline__ void windowed_blocks(Work& work, bool searching) {
    int masked_down_to = max((work.full_end - 1) / kBlockK, work.own.first);
    const int whole_down_to = max((work.full_begin + kBlockK - 1) / kBlockK, work.own.first);
    while (work.block >= work.own.first) {
#pragma unroll 1
      for (; work.block >= work.own.first && (work.block >= masked_down_to || searching);
           --work.block) {
        step<true>(work);
        if (searching) searching = rows_uninitialized(work);
      }
#pragma unroll 1
      for (; work.block >= whole_down_to; --work.block) step<false>(work);
      masked_down_to = work.own.first;
    }
  }
  __device__ __forceinline__ void remaining_blocks(Work& work) {
    const bool searching = rows_uninitialized(work);
    --work.block;
    if constexpr (kWindowed && !kOneLoop) {
      windowed_blocks(work, searching);
    } else {
#pragma unroll 1
      for (; work.block >= work.own.first; --work.block) step<kWindowed>(work);
    }
  }

  __device__ __forceinline__ void run() {
    clear_output();
#pragma unroll
    for (int n = 0; n < kBlockK / 16; ++n) p[n][0] = p[n][1] = p[n][2] = p[n][3] = 0;
    rows.row_max_log2[0] = rows.row_max_log2[1] = rows.sum[0] = rows.sum[1] = 0.f;
    if (w == C::kConsumers - 1) pingpong_arrive();
#pragma unroll 1
    for (;; ++tiles) {
      // With one Q stage the next Q has not arrived yet: the last product and the output hide its
      // load.
      if (C::kQStages == 1 && pending) finish(tiles - 1);
      const uint32_t q_stage = tiles % C::kQStages;
      wait(shared.q_full[q_stage][w], tiles / C::kQStages);
      const TileInfo& info = shared.tile_info[tiles % kTileSlots];
      // Equal in all lanes, which the compiler learns only from redux: wgmma needs uniform control
      // flow.
      const int row = ptx::redux_max(info.row);
      if (row < 0) break;
      const int seq_q = kVarlen ? ptx::redux_max(info.seq_q) : a.p.seq_q;
      const int seq_k = kVarlen ? ptx::redux_max(info.seq_k) : a.p.seq_k;
      const Window seen = window_of(a.p, seq_q, seq_k);
      const int first_row = row + w * 64;
      const Blocks<C> blocks(seen, row, C::kBlockQ, seq_q);  // of all consumers
      Work work{info, row, seq_q, seq_k, Blocks<C>(seen, first_row, 64, seq_q)};
      if (C::kHasLattice && a.bias_mask.boxes > 0)
        bias_place = place_on_lattice<C>(a, info, row_in_tile);
      const bool nothing = work.own.first >= work.own.end;
      if (nothing) work.own.first = work.own.end = blocks.first;
      // One skipped block may overtake a pending product; more would wait for the stage it holds.
      const int ahead = blocks.end - work.own.end;
      if (pending && (nothing || ahead >= kStages)) finish(tiles - 1);
      const uint32_t pending_v = head - 1;
      skip(ahead);
      if (nothing) {
        release(shared.q_empty[q_stage][w]);
        clear_output();
        rows.sum[0] = rows.sum[1] = 0.f;
        write(rows, info);
        continue;
      }
      work.full_begin = seen.begin(first_row + 63);
      work.full_end = max(seen.end(first_row), 0);
      work.block = work.own.end - 1;
      const RowStatistics rows_before = rows;
      wait_k();
      pingpong_wait();
      ptx::wgmma_fence();
      // The diagonal or the end often cuts it: half a block costs half.
      if (kHalfBlocks && work.own.end_key <= work.block * kBlockK + kBlockK / 2) {
        float half[kHalfBlocks ? kBlockK / 4 : kBlockK / 2];
        first_block<MmaQKHalf>(half, work, pending_v);
      } else {
        first_block<MmaQK>(s, work, pending_v);
      }
      if (C::kQStages > 1 && pending)
        write(rows_before, shared.tile_info[(tiles - 1) % kTileSlots]);
      accumulate = 0;
      pending = true;
      ++head;
      remaining_blocks(work);
      if (kWindowed && work.own.first > blocks.first) {
        finish(tiles);
        skip(work.own.first - blocks.first);
      }
    }
    if (pending) finish(tiles - 1);
    ptx::bulk_wait_read<0>();
    if (w == 0) pingpong_wait();  // takes the last turn, so that the barrier ends balanced
  }
};

template <class Op, class C, bool kWindowed, bool kPlainScores, bool kVarlen>
__device__ __forceinline__ void consume(SharedStorage<C>& shared, const ForwardArgs& a, int w) {
  // In a uniform register, and so are the addresses computed from it: otherwise windows spill.
  if constexpr (C::kHeadDim == 256) w = ptx::redux_max(w);
  Consumer<Op, C, kWindowed, kPlainScores, kVarlen>(shared, a, w).run();
}

}  // namespace flashsci::sm90::fwd
