// A consumer warpgroup of the sm90 forward: 64 query rows from S to the stores.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../../ptx/cp_async.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/redux.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../../ptx/wgmma.cuh"
#include "bias_mask.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "overflow.cuh"
#include "softmax.cuh"

namespace flashsci::sm90::fwd {

template <class Op, class C, bool kWindowed, bool kPlainScores, bool kVarlen>
__device__ __forceinline__ void consume(SharedStorage<C>& shared, const ForwardArgs& a, int w) {
  // In a uniform register, and with it the addresses that follow: else windows spill.
  if constexpr (C::kHeadDim == 256 && !C::kHasBiasMask) w = ptx::redux_max(w);
  constexpr int kBlockK = C::kBlockK, kStages = C::kStages;
  constexpr int kHeadDim = C::kHeadDim, kHeadDimV = C::kHeadDimV;
  // Over masked and whole blocks, all of which look for the maximum: two loops spill.
  constexpr bool kOneLoop = kHeadDim > 128 && !kPlainScores && !C::kHasBiasMask;
  using MmaQK = typename Op::template Wgmma<kBlockK>;
  constexpr bool kHalves = kBlockK > 32;  // a first block of half width
  using MmaQKHalf = typename Op::template Wgmma<kHalves ? kBlockK / 2 : kBlockK>;
  using MmaPV = typename Op::template Wgmma<kHeadDimV>;
  const int lane = threadIdx.x % 32;
  const int warp_row = w * 64 + threadIdx.x / 32 % 4 * 16;  // in the tile
  const int row_in_tile = warp_row + lane / 4;              // this lane's first
  auto& staging = shared.staging[warp_row / 16];

  float s[kBlockK / 2];         // scores, then P
  float o[kHeadDimV / 2];       // output, unnormalised
  uint32_t p[kBlockK / 16][4];  // P as operand, per 16 keys
  RowStatistics rows;
  float alpha[2];
  BiasMaskRing ring;
  uint32_t head = 0;   // K blocks behind us: they tell stage and phase of the next
  uint32_t tiles = 0;  // tiles behind us
  bool pending =
      false;  // P of block head - 1 waits for its product, the output of a tile for its end

  const uint64_t q_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.q[0][w]), 16, 1024);
  const uint64_t k_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.k), 16, 1024);
  const uint64_t v_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.v), kBlockK * 128, 1024);
  const auto issue_qk = [&](auto mma, auto& scores) {
    const uint64_t q_tile = q_desc + tiles % C::kQStages * (C::kConsumers * C::kQBytes / 16);
    const uint64_t k_tile = k_desc + head % kStages * (C::kKBytes / 16);
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d)
      decltype(mma)::template ss<0>(scores, q_tile + (d / 4 * 8192 + d % 4 * 32) / 16,
                                    k_tile + (d / 4 * kBlockK * 128 + d % 4 * 32) / 16, d > 0);
    ptx::wgmma_commit();
  };
  uint32_t accumulate = 0;                  // 0: O counts as cleared
  const auto issue_pv = [&](uint32_t at) {  // O += P V
    const uint64_t v_tile = v_desc + at % kStages * (C::kVBytes / 16);
#pragma unroll
    for (int n = 0; n < kBlockK / 16; ++n)
      MmaPV::template rs<1>(o, p[n], v_tile + n * (2048 / 16), n > 0 ? 1 : accumulate);
    ptx::wgmma_commit();
    accumulate = 1;
  };
  // The scores of the block whose first `kCount` elements these are become P; the rest of P is 0.
  const auto pack = [&](auto& scores) {
    constexpr int kCount = sizeof(scores) / 4;
#pragma unroll
    for (int e = 0; e < kBlockK / 2; e += 2)
      p[e / 8][e / 2 % 4] = e < kCount ? Op::pack2(scores[e % kCount], scores[e % kCount + 1]) : 0;
  };
  const auto release = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  };
  const auto wait = [&](uint64_t& barrier, uint32_t parity) {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), parity & 1);
  };
  // One warpgroup waits, one arrives.
  const auto pingpong_wait = [&] { ptx::barrier_sync(1 + w, 256); };
  const auto pingpong_arrive = [&] { ptx::barrier_arrive(1 + (w + 1) % C::kConsumers, 256); };
  const auto wait_k = [&] { wait(shared.k_full[head % kStages], head / kStages); };
  const auto wait_v = [&](uint32_t at) { wait(shared.v_full[at % kStages], at / kStages); };
  // Blocks that this warpgroup's rows do not see; the producer hands them on.
  const auto skip = [&](int count) {
    head += count;
#pragma unroll 1
    for (; count > 0; --count) {
      pingpong_wait();
      pingpong_arrive();
      if constexpr (C::kHasBiasMask) ring.next(a.bias_mask);
    }
  };
  // What is added to the scores of a block, or of its first half: a bias of 16 bits is fetched
  // while they are computed.
  constexpr bool kAhead = C::kHasBiasMask && (kHeadDim == 32 || kHeadDim == 128);  // measured
  const auto place = [&]() -> uint32_t {
    if constexpr (C::kHasBiasMask)
      return ptx::shared_address(shared.bias_mask) + ring.stage * a.bias_mask.stage_bytes;
    return 0;
  };
  const auto fetch = [&](auto& words) {
    fetch_16_bit<kBlockK>(words, a.bias_mask, place() + w * a.bias_mask.bias_step);
  };
  const auto fetch_ahead = [&](auto& words) {
    if constexpr (C::kHasBiasMask) wait(shared.bias_mask_full[ring.stage], ring.phase);
    if constexpr (kAhead) fetch(words);
  };
  const auto with_bias_mask = [&](auto& scores, auto& words) {
    if constexpr (C::kHasBiasMask) {
      const FlashsciBiasMask& bias_mask = a.p.bias_mask;
      const bool scaled = a.score_mode == kSoftcap || bias_mask.bias == nullptr;
      if (scaled) scale_scores(scores, a);
      const float inner = scaled ? 1.f : a.score_inner;
      if (bias_mask.bias != nullptr && bias_mask.bias_is_fp32) {
        add_fp32<kBlockK>(scores, a.bias_mask, inner, place() + w * a.bias_mask.bias_step);
      } else if (bias_mask.bias != nullptr) {
        if constexpr (!kAhead) fetch(words);
        add_16_bit<Op>(scores, words, inner);
      }
      if (bias_mask.mask != nullptr)
        hide<kBlockK>(scores, a.bias_mask, place() + a.bias_mask.mask + w * a.bias_mask.mask_step);
      release(shared.bias_mask_empty[ring.stage]);
      ring.next(a.bias_mask);
    }
  };
  const auto write = [&](const RowStatistics& of, const TileInfo& tile) {
    write_output<Op, C, kVarlen>(o, of, a, tile, kVarlen ? tile.seq_q : a.p.seq_q, warp_row,
                                 staging);
  };
  // The last product of the tile that is pending, and its output.
  const auto finish = [&](uint32_t tile) {
    const uint32_t at = head - 1;
    wait_v(at);
    ptx::wgmma_fence();
    issue_pv(at);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(o);
    release(shared.v_empty[at % kStages]);
    write(rows, shared.tile_info[tile % kTileSlots]);
    pending = false;
  };

  const auto clear = [&] {
#pragma unroll
    for (int e = 0; e < kHeadDimV / 2; ++e) o[e] = 0.f;
  };

  clear();
#pragma unroll
  for (int n = 0; n < kBlockK / 16; ++n) p[n][0] = p[n][1] = p[n][2] = p[n][3] = 0;
  rows.row_max_log2[0] = rows.row_max_log2[1] = rows.sum[0] = rows.sum[1] = 0.f;
  if (w == C::kConsumers - 1) pingpong_arrive();
#pragma unroll 1
  for (;; ++tiles) {
    // With one Q stage the next Q is not there yet: the last product and the output hide its load.
    if (C::kQStages == 1 && pending) finish(tiles - 1);
    const uint32_t q_stage = tiles % C::kQStages;
    wait(shared.q_full[q_stage][w], tiles / C::kQStages);
    const TileInfo& tile = shared.tile_info[tiles % kTileSlots];
    // The same in all lanes, which only redux tells the compiler: wgmma wants uniform control flow.
    const int tile_row = ptx::redux_max(tile.row);
    if (tile_row < 0) break;
    const int seq_q = kVarlen ? ptx::redux_max(tile.seq_q) : a.p.seq_q;
    const int seq_k = kVarlen ? ptx::redux_max(tile.seq_k) : a.p.seq_k;
    const Window window = window_of(a.p, seq_q, seq_k);
    const int first_row = tile_row + w * 64;
    const Blocks<C> blocks(window, tile_row, C::kBlockQ, seq_q);
    Blocks<C> own(window, first_row, 64, seq_q);
    const bool nothing = own.first >= own.end;
    if (nothing) own.first = own.end = blocks.first;
    // One skipped block may overtake a pending product, more would wait for the stage it holds.
    const int ahead = blocks.end - own.end;
    if (pending && (nothing || ahead >= kStages)) finish(tiles - 1);
    const uint32_t pending_v = head - 1;
    skip(ahead);
    if (nothing) {
      release(shared.q_empty[q_stage][w]);
      clear();
      rows.sum[0] = rows.sum[1] = 0.f;
      write(rows, tile);
      continue;
    }
    // All rows of this warpgroup see the keys [full_begin, full_end).
    const int full_begin = window.begin(first_row + 63), full_end = max(window.end(first_row), 0);
    const auto mask_half = [&](auto& scores, int block) {
      const Window window =
          kVarlen ? window_of(a.p, tile.seq_q, tile.seq_k)
                  : window_of(a.p, a.p.seq_q, a.p.seq_k);  // again: registers are scarce
      const int first_key = block * kBlockK, column = first_key + lane % 4 * 2;
      const int row = tile.row + row_in_tile;
      if (first_key + kBlockK / 2 > full_end)
        mask_scores<0, kBlockK / 4, false>(scores, window, row, column);
      if (kWindowed && first_key < full_begin)
        mask_scores<0, kBlockK / 4, true>(scores, window, row, column);
    };
    const auto mask = [&](int block) {
      mask_half(s, block);
      const Window window =
          kVarlen ? window_of(a.p, tile.seq_q, tile.seq_k) : window_of(a.p, a.p.seq_q, a.p.seq_k);
      const int first_key = block * kBlockK, column = first_key + lane % 4 * 2;
      const int row = tile.row + row_in_tile;
      if (first_key + kBlockK > full_end)
        mask_scores<kBlockK / 4, kBlockK / 2, false>(s, window, row, column);
      if (kWindowed && first_key + kBlockK / 2 < full_begin)
        mask_scores<kBlockK / 4, kBlockK / 2, true>(s, window, row, column);
    };

    // The first block of a tile beside the last product of the tile before.
    int block = own.end - 1;
    const RowStatistics rows_before = rows;
    const auto issue_pending = [&] {
      if constexpr (C::kQStages > 1) {
        if (pending) wait_v(pending_v);
        // No-op if nothing is pending; a branch would serialise wgmma (C7520).
        issue_pv(pending_v);
      }
      pingpong_arrive();
    };
    const auto after_qk = [&] {
      release(shared.k_empty[head % kStages]);
      if (block == own.first) release(shared.q_empty[q_stage][w]);
    };
    const auto after_pv = [&] {
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(o);
      if (pending) release(shared.v_empty[pending_v % kStages]);
    };
    wait_k();
    pingpong_wait();
    ptx::wgmma_fence();
    // The diagonal or the end often cuts it: half a block costs half.
    if (kHalves && own.end_key <= block * kBlockK + kBlockK / 2) {
      float half[kHalves ? kBlockK / 4 : kBlockK / 2];
      issue_qk(MmaQKHalf{}, half);
      issue_pending();
      uint32_t words[kHalves ? kBlockK / 8 : kBlockK / 4];
      fetch_ahead(words);
      ptx::wgmma_wait<(C::kQStages > 1)>();
      ptx::wgmma_tie(half);
      after_qk();
      if constexpr (C::kHasBiasMask)
        with_bias_mask(half, words);
      else if constexpr (!kPlainScores)
        scale_scores(half, a);
      mask_half(half, block);
      softmax_first(half, rows, a.exp_scale);
      after_pv();
      pack(half);
    } else {
      issue_qk(MmaQK{}, s);
      issue_pending();
      uint32_t words[kBlockK / 4];
      fetch_ahead(words);
      ptx::wgmma_wait<(C::kQStages > 1)>();
      ptx::wgmma_tie(s);
      after_qk();
      if constexpr (C::kHasBiasMask)
        with_bias_mask(s, words);
      else if constexpr (!kPlainScores)
        scale_scores(s, a);
      mask(block);
      softmax_first(s, rows, a.exp_scale);
      after_pv();
      pack(s);
    }
    if (C::kQStages > 1 && pending) write(rows_before, shared.tile_info[(tiles - 1) % kTileSlots]);
    accumulate = 0;
    pending = true;
    ++head;
    // Blocks are not masked, but bias or mask may have hidden all keys of a row so far.
    bool searching = false;
    const auto check_rows = [&] {
      if constexpr (C::kOptimistic) {
        const int row = tile_row + row_in_tile;
        const bool found = (rows.row_max_log2[0] != kUninitializedMax || row >= seq_q) &&
                           (rows.row_max_log2[1] != kUninitializedMax || row + 8 >= seq_q);
        searching = ptx::redux_max(!ptx::barrier_all(8 + w, 128, found));
      }
    };
    check_rows();

    const auto step = [&](auto masked) {
      wait_k();
      pingpong_wait();
      ptx::wgmma_fence();
      issue_qk(MmaQK{}, s);
      const uint32_t at = head - 1;
      wait_v(at);
      if constexpr (kOneLoop) ptx::wgmma_fence();  // or ptxas adds one, and waits for every product
      issue_pv(at);
      pingpong_arrive();
      uint32_t words[kBlockK / 4];
      fetch_ahead(words);
      ptx::wgmma_wait<1>();
      ptx::wgmma_tie(s);
      after_qk();
      if constexpr (C::kHasBiasMask)
        with_bias_mask(s, words);
      else if constexpr (!kPlainScores)
        scale_scores(s, a);
      const auto rescale = [&] {
#pragma unroll
        for (int e = 0; e < kHeadDimV / 2; ++e) o[e] *= alpha[e >> 1 & 1];
      };
      const auto pv_done = [&] {
        ptx::wgmma_wait<0>();
        ptx::wgmma_tie(o);
        release(shared.v_empty[at % kStages]);
      };
      if constexpr (decltype(masked)::value || (!kPlainScores && !C::kOptimistic)) {
        if constexpr (decltype(masked)::value) {
          const int first_key = block * kBlockK;
          if (!kOneLoop || first_key + kBlockK > full_end || first_key < full_begin) mask(block);
        }
        const bool grew = softmax_next(s, rows, alpha, a.exp_scale);
        pv_done();
        if (grew) rescale();
        pack(s);
      } else {
        // Without looking for the maximum first: it hardly moves, and overflow shows in the sums.
        float part[4];
        if constexpr (C::kEarly > 0) {
          exponentials<false, 0, C::kEarly>(s, rows.row_max_log2, a.exp_scale, part);
          ptx::schedule_fence(part[3]);
        }
        pv_done();
        // Else ptxas releases V last, and with two stages the next V comes late.
        if constexpr (C::kQStages == 1) ptx::schedule_fence(a.p.seq_k);
        exponentials<false, C::kEarly, kBlockK / 2>(s, rows.row_max_log2, a.exp_scale, part);
        float sum[2] = {part[0] + part[1], part[2] + part[3]};
        pack(s);
        if (__any_sync(0xffffffffu, sum[0] > kOverflow || sum[1] > kOverflow)) {
          if (__any_sync(0xffffffffu, sum[0] > kHopeless || sum[1] > kHopeless)) {
            const int row = tile.row + row_in_tile, key = block * kBlockK;
            // Rolled where it is long.
            recompute_scores<Op, C::kHasBiasMask ? 1 : kBlockK / 8>(
                s, a, tile, row, seq_q, key, [&](auto& c, int n) {
                  if constexpr (C::kHasBiasMask)
                    add_bias_mask_again<Op>(c, a, tile, row, key + n * 8 + lane % 4 * 2);
                });
            sum[0] = sum[1] = 0.f;
            alpha[0] = alpha[1] = 1.f;
            softmax_next(s, rows, alpha, a.exp_scale);
          } else {
            follow_growth(s, rows, sum, alpha);
          }
          rescale();
          pack(s);
        }
        rows.sum[0] += sum[0];
        rows.sum[1] += sum[1];
      }
      ++head;
    };
    --block;
    if constexpr (kWindowed) {
      if constexpr (kOneLoop) {
#pragma unroll 1
        for (; block >= own.first; --block) step(std::true_type{});
      } else {
        // Masked blocks on the right, then whole ones, then masked ones on the left. Every row has
        // seen a key before the first whole block.
        int masked_down_to = max((full_end - 1) / kBlockK, own.first);
        const int whole_down_to = max((full_begin + kBlockK - 1) / kBlockK, own.first);
        while (block >= own.first) {
#pragma unroll 1
          for (; block >= own.first && (block >= masked_down_to || searching); --block) {
            step(std::true_type{});
            if (searching) check_rows();
          }
#pragma unroll 1
          for (; block >= whole_down_to; --block) step(std::false_type{});
          masked_down_to = own.first;
        }
      }
      if (own.first > blocks.first) {
        finish(tiles);
        skip(own.first - blocks.first);
      }
    } else {
#pragma unroll 1
      for (; block >= own.first; --block) step(std::false_type{});
    }
  }
  if (pending) finish(tiles - 1);
  ptx::bulk_wait_read<0>();
  if (w == 0) pingpong_wait();  // the last turn handed round, so that the barrier ends balanced
}

}  // namespace flashsci::sm90::fwd
