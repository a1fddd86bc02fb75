// A consumer warpgroup of the sm90 backward: 64 keys, from S^T to dK and dV, and its part of dQ.
#pragma once
#include <cstdint>

#include "../common/ptx/cp_async.cuh"
#include "../common/ptx/math.cuh"
#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/shared.cuh"
#include "../common/ptx/stmatrix.cuh"
#include "../common/ptx/stmatrix_trans.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "../common/ptx/wgmma.cuh"
#include "../common/softmax.cuh"
#include "../common/tile.cuh"
#include "backward_apart.cuh"
#include "backward_layout.cuh"
#include "backward_pairs.cuh"

namespace flashsci::sm90 {

// Accumulator element e of a lane is key 16 warp + lane / 4 + 8 ((e >> 1) & 1) of the warpgroup's
// 64 and query 8 (e >> 2) + 2 (lane % 4) + (e & 1) of the block.

// Pairs outside the window get `value`. key, query: of this lane's first element.
template <int kCount>
__device__ __forceinline__ void hide(float (&x)[kCount], const Window& window, int key, int query,
                                     float value) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int j = key + 8 * half;
    const int begin = j < window.seq_k ? j - window.after + 1 - query : 1 << 30;
    const int end = j - window.before + 1 - query;
#pragma unroll
    for (int e = 2 * half; e < kCount; e += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = e / 4 * 8 + i;
        if (column < begin || column >= end) x[e + i] = value;
      }
    }
  }
}

// 64 rows of dK or dV (of a wide tile: all): through shared memory of 64-column boxes of kBlockK
// rows.
template <class Op, class C, bool kPacked>
__device__ __forceinline__ void write_rows(const float (&x)[C::kHeadDim / 2], float scale,
                                           uint32_t shared, const CUtensorMap& map, void* base,
                                           const FlashsciStrides& strides, int columns,
                                           const KeyTile& tile, int w) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int part = C::kWide ? 0 : w;
  const int row = tile.row + part * 64, rows = ptx::redux_max(tile.seq_k - row);
  if (base == nullptr || rows <= 0) return;
  const uint32_t target = shared + part * 8192;
  const uint32_t target_row = target + (warp * 16 + lane % 16) * 128;
#pragma unroll
  for (int j = 0; j < C::kHeadDim / 16; ++j)
    ptx::stmatrix_x4(
        target_row + j / 4 * (C::kBlockK * 128) + ((j % 4 * 2 + lane / 16) ^ (lane % 8)) * 16,
        Op::pack2(x[j * 8] * scale, x[j * 8 + 1] * scale),
        Op::pack2(x[j * 8 + 2] * scale, x[j * 8 + 3] * scale),
        Op::pack2(x[j * 8 + 4] * scale, x[j * 8 + 5] * scale),
        Op::pack2(x[j * 8 + 6] * scale, x[j * 8 + 7] * scale));
  ptx::fence_proxy_async();
  ptx::barrier_sync(1 + w, 128);
  if (!kPacked || rows >= 64) {
    if (warp == 0 && ptx::elect()) {
#pragma unroll
      for (int block = 0; block < C::kColumnBlocks; ++block)
        ptx::tma_store_5d(&map, target + block * (C::kBlockK * 128), block * 64, tile.first_k + row,
                          tile.head, tile.batch1, tile.batch0);
      ptx::bulk_commit();
    }
  } else {  // where a packed sequence ends
    const int thread = threadIdx.x % 128;
    auto* out = static_cast<uint16_t*>(base) + tile.head * strides.head +
                (tile.first_k + row) * strides.row;
#pragma unroll 1
    for (int i = thread / 8; i < rows; i += 16) {
#pragma unroll
      for (int block = 0; block < C::kColumnBlocks; ++block) {
        const int column = block * 64 + thread % 8 * 8;
        if (column < columns)
          *reinterpret_cast<uint4*>(out + i * strides.row + column) = ptx::ld_shared_v4(
              target + block * (C::kBlockK * 128) + i * 128 + ((thread % 8) ^ (i % 8)) * 16);
      }
    }
  }
}

template <class Op, class C, bool kPacked, bool kSoftcap>
__device__ __forceinline__ void consume(BackwardStorage<C>& shared, const BackwardArgs& a, int w) {
  constexpr int kHeadDim = C::kHeadDim, kBlockQ = C::kBlockQ, kBlockK = C::kBlockK;
  constexpr int kStages = C::kStages;
  using MmaS = typename Op::template Wgmma<kBlockQ>;
  using MmaKV = typename Op::template Wgmma<kHeadDim>;
  using MmaDq = typename Op::template Wgmma<C::kDqColumns>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const auto address = [](const void* x) { return ptx::shared_address(x); };

  float dk[kHeadDim / 2], dv[kHeadDim / 2];
#pragma unroll
  for (int e = 0; e < kHeadDim / 2; ++e) dk[e] = dv[e] = 0.f;

  // In shared memory, as registers are scarce; the same in all lanes, which only redux tells the
  // compiler: wgmma wants uniform control flow.
  const KeyTile& tile = shared.tile;
  const int begin_block = ptx::redux_max(tile.begin), end_block = ptx::redux_max(tile.end);
  const int turns = (end_block - begin_block) * (a.p.heads_q / a.p.heads_k);
  if (turns > 0) {
    float prob[kBlockQ / 2], dp[kBlockQ / 2];
    uint32_t p[kBlockQ / 16][4], ds[kBlockQ / 16][4];  // P^T and dS^T as operands, per 16 queries
    const uint64_t k_rows = ptx::wgmma_descriptor(address(shared.k + w * 8192), 16, 1024);
    const uint64_t v_rows = ptx::wgmma_descriptor(address(shared.v + w * 8192), 16, 1024);
    const uint64_t q_rows = ptx::wgmma_descriptor(address(shared.q), 16, 1024);
    const uint64_t dout_rows = ptx::wgmma_descriptor(address(shared.dout), 16, 1024);
    const uint64_t q_columns = ptx::wgmma_descriptor(address(shared.q), kBlockQ * 128, 1024);
    const uint64_t dout_columns = ptx::wgmma_descriptor(address(shared.dout), kBlockQ * 128, 1024);
    const uint64_t ds_rows =
        ptx::wgmma_descriptor(address(shared.ds) + (C::kSplitRows ? w * 8192 : 0), 16, 1024);
    const uint64_t k_columns = ptx::wgmma_descriptor(
        address(shared.k) + (C::kSplitRows    ? 0
                             : kHeadDim == 64 ? w * 64
                                              : w * (kHeadDim / 128) * kBlockK * 128),
        kBlockK * 128, 1024);
    const uint32_t lse = address(shared.lse) + lane % 4 * 8;
    const uint32_t delta = address(shared.delta) + lane % 4 * 8;

    // x^T = (rows of K or V) (rows of Q or dO)^T
    const auto issue_product = [&](float (&x)[kBlockQ / 2], uint64_t mine, uint64_t streamed,
                                   uint32_t stage) {
      streamed += stage * (C::kQBytes / 16);
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d)
        MmaS::template ss<0>(x, mine + (d / 4 * kBlockK * 128 + d % 4 * 32) / 16,
                             streamed + (d / 4 * kBlockQ * 128 + d % 4 * 32) / 16, d > 0);
      ptx::wgmma_commit();
    };
    // x += (P or dS)^T (dO or Q)
    const auto issue_sum = [&](float (&x)[kHeadDim / 2], const uint32_t (&by)[kBlockQ / 16][4],
                               uint64_t streamed, uint32_t stage, int begin, int end) {
      streamed += stage * (C::kQBytes / 16);
#pragma unroll
      for (int m = begin; m < end; ++m)
        MmaKV::template rs<1>(x, by[m], streamed + m * (2048 / 16), 1);
      ptx::wgmma_commit();
    };
    // P of 128 queries becomes an operand in two parts, the second when dS of the first has freed
    // registers.
    constexpr int kParts = kBlockQ == 128 && !kSoftcap ? 2 : 1;
    const auto pack = [&](int begin, int end) {
#pragma unroll
      for (int e = begin * 8; e < end * 8; e += 2)
        p[e / 8][e / 2 % 4] = Op::pack2(prob[e], prob[e + 1]);
    };
    const auto release = [&](uint64_t& barrier) {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(address(&barrier));
    };

    // Blocks [full_begin, full_end) see all of the 64 keys.
    int full_begin, full_end;
    {
      const Window window = window_of(a.p, tile.seq_q, tile.seq_k);
      const int first_key = tile.row + w * 64;
      const int first_query = max(first_key + 64 - window.after, 0);
      const bool all = first_key + 64 <= tile.seq_k;
      full_begin = ptx::redux_max(all ? (first_query + kBlockQ - 1) / kBlockQ : INT32_MAX);
      full_end = ptx::redux_max(max(first_key - window.before + 1, 0) / kBlockQ);
    }
    int block = begin_block;
    const auto issue_scores = [&](float (&s)[kBlockQ / 2], int turn) {
      wait_for(shared.q_full[turn % kStages], turn / kStages);
      ptx::wgmma_fence();
      issue_product(s, k_rows, q_rows, turn % kStages);
    };
    // dP^T, beside it P^T; then all products are done.
    const auto exponentiate = [&](float (&s)[kBlockQ / 2], int turn) {
      const uint32_t stage = turn % kStages;
      wait_for(shared.dout_full[stage], turn / kStages);
      ptx::wgmma_fence();
      issue_product(dp, v_rows, dout_rows, stage);
      ptx::wgmma_wait<1>();
      ptx::wgmma_tie(s);
      const auto hide_outside = [&](float value) {
        if (block < full_begin || block >= full_end)
          hide(prob, window_of(a.p, tile.seq_q, tile.seq_k),
               tile.row + w * 64 + warp * 16 + lane / 4, block * kBlockQ + lane % 4 * 2, value);
      };
      if constexpr (kSoftcap) {
#pragma unroll
        for (int e = 0; e < kBlockQ / 2; ++e) prob[e] = tanh_accurate(s[e] * a.cap_inner);
        hide_outside(-INFINITY);
      }
      if constexpr (C::kPairs) {
        const int pair_stage = turn % C::kPairStages;
        if (C::kApart || a.bias_tiles)
          wait_for(shared.bias_full[pair_stage], turn / C::kPairStages);
        uint32_t bias;
        if constexpr (C::kApart)
          bias = address(shared.pairs[pair_stage]);
        else
          bias = address(shared.ds[pair_stage]) + w * (kBlockQ * 128);
        exponentiate_pairs<Op, C>(prob, s, a, tile, lse + stage * (kBlockQ * 4), bias, w, turn);
      }
#pragma unroll
      for (int n = 0; n < (C::kPairs ? 0 : kBlockQ / 8); ++n) {
        const float2 row = ptx::ld_shared_f2(lse + stage * (kBlockQ * 4) + n * 32);
#pragma unroll
        for (int e = n * 4; e < n * 4 + 4; ++e) {
          const float offset = e % 2 == 0 ? row.x : row.y;
          if constexpr (kSoftcap)
            s[e] = ptx::ex2_approx(fmaf(prob[e], a.cap_outer, -offset));
          else
            prob[e] = ptx::ex2_approx(fmaf(s[e], a.exp_scale, -offset));
        }
      }
      if constexpr (!kSoftcap) hide_outside(0.f);
      if (++block == end_block) block = begin_block;
      if constexpr (kSoftcap) {  // P as operand of dV; for dS it takes the slope
#pragma unroll
        for (int e = 0; e < kBlockQ / 2; e += 2) p[e / 8][e / 2 % 4] = Op::pack2(s[e], s[e + 1]);
#pragma unroll
        for (int e = 0; e < kBlockQ / 2; ++e)
          prob[e] = s[e] * fmaxf(fmaf(-prob[e], prob[e], 1.f), 0.f);
        ptx::wgmma_tie(prob);
      } else {
        ptx::wgmma_tie(prob);
        pack(0, kBlockQ / 16 / kParts);
      }
      ptx::schedule_fence(prob[kBlockQ / 2 - 1]);
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(dp);
    };
    // dV, and dS^T as operand.
    const auto issue_dv = [&](int turn) {
      const uint32_t stage = turn % kStages;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        constexpr int kSteps = kBlockQ / 16 / kParts;
        const int first = part * kSteps;
        if (part > 0) pack(first, first + kSteps);
        ptx::wgmma_fence();
        issue_sum(dv, p, dout_columns, stage, first, first + kSteps);
#pragma unroll
        for (int n = first * 2; n < (first + kSteps) * 2; ++n) {
          const float2 row = ptx::ld_shared_f2(delta + stage * (kBlockQ * 4) + n * 32);
#pragma unroll
          for (int e = n * 4; e < n * 4 + 4; e += 2) {
            prob[e] *= dp[e] + row.x;
            prob[e + 1] *= dp[e + 1] + row.y;
            ds[e / 8][e / 2 % 4] = Op::pack2(prob[e], prob[e + 1]);
          }
        }
      }
      if constexpr (C::kApart)
        leave_apart(prob, a, ApartBias<C>(address(shared.pairs[turn % C::kPairStages]), w));
    };
    const auto share_ds = [&](int turn) {
      // Addresses anew: registers are scarcer than integer instructions.
      const int thread = opaque(threadIdx.x), matrix_row = thread % 8;
      const uint32_t ds_store = address(shared.ds) + w * (kBlockQ * 128) +
                                (matrix_row + thread % 32 / 16 * 8) * 128 +
                                ((thread / 32 % 4 * 2 + thread / 8 % 2) ^ matrix_row) * 16;
#pragma unroll
      for (int m = 0; m < kBlockQ / 16; ++m)
        ptx::stmatrix_x4_trans(ds_store + turn % C::kDsStages * C::kDsBytes + m * 2048, ds[m]);
      ptx::fence_proxy_async();
      if constexpr (C::kApart) release(shared.ds_done[turn % C::kPairStages]);
    };
    const auto issue_dk = [&](int turn) {
      ptx::wgmma_fence();
      issue_sum(dk, ds, q_columns, turn % kStages, 0, kBlockQ / 16);
    };
    const auto issue_dq = [&](float (&dq)[C::kDqColumns / 2], int turn) {
      const uint64_t rows = ds_rows + turn % C::kDsStages * (C::kDsBytes / 16);
      ptx::wgmma_fence();
#pragma unroll
      for (int n = 0; n < kBlockK / 16; ++n)
        MmaDq::template ss<1>(dq, rows + (n / 4 * kBlockQ * 128 + n % 4 * 32) / 16,
                              k_columns + n * (2048 / 16), n > 0);
      ptx::wgmma_commit();
    };
    const auto write_dq = [&](const float (&dq)[C::kDqColumns / 2], int turn) {
      const int stage = turn % C::kDqStages;
      const uint32_t dq_store = address(shared.dq[0][w]) + opaque(threadIdx.x) % 128 * 16;
      wait_for(shared.dq_empty[stage][w], turn / C::kDqStages + 1);
#pragma unroll
      for (int j = 0; j < C::kDqColumns / 8; ++j)
        ptx::st_shared(dq_store + stage * (C::kConsumers * C::kDqFloats * 4) + j * 2048,
                       make_uint4(__float_as_uint(dq[j * 4]), __float_as_uint(dq[j * 4 + 1]),
                                  __float_as_uint(dq[j * 4 + 2]), __float_as_uint(dq[j * 4 + 3])));
      ptx::fence_proxy_async();
      release(shared.dq_full[stage][w]);
    };

    wait_for(shared.kv_full, 0);
    const auto begin_turn = [&](int turn) {
      float s[kBlockQ / 2];
      issue_scores(s, turn);
      exponentiate(s, turn);
      issue_dv(turn);
    };
    const auto end_turn = [&](int turn) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(dk);
      release(shared.q_empty[turn % kStages]);
    };
    begin_turn(0);
    share_ds(0);
    issue_dk(0);
    ptx::wgmma_wait<1>();
    ptx::wgmma_tie(dv);
    release(shared.ds_full);
    if constexpr (C::kPairs && !C::kApart) release(shared.ds_done[0]);
    release(shared.dout_empty[0]);
    end_turn(0);
#pragma unroll 1
    for (int turn = 1; turn < turns; ++turn) {
      float dq[C::kDqColumns / 2];
      begin_turn(turn);
      // The other consumer has shared dS of the block before, and read what is overwritten now.
      wait_for(shared.ds_full, turn - 1);
      share_ds(turn);
      if constexpr (kBlockQ == 128 || kSoftcap) {  // frees the registers of P
        ptx::wgmma_wait<0>();
        ptx::wgmma_tie(dv);
      }
      issue_dq(dq, turn - 1);
      issue_dk(turn);
      ptx::wgmma_wait<1>();
      ptx::wgmma_tie(dq);
      ptx::wgmma_tie(dv);
      release(shared.ds_full);
      if constexpr (C::kPairs && !C::kApart) release(shared.ds_done[turn % C::kDsStages]);
      release(shared.dout_empty[turn % kStages]);
      write_dq(dq, turn - 1);
      end_turn(turn);
    }
    float dq[C::kDqColumns / 2];
    wait_for(shared.ds_full, turns - 1);
    issue_dq(dq, turns - 1);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(dq);
    write_dq(dq, turns - 1);
    ptx::barrier_sync(3, 128 * C::kConsumers);  // nobody reads K any more
  }
  write_rows<Op, C, kPacked>(dv, 1.f, address(shared.v), a.dv, a.p.dv, a.p.dv_strides,
                             a.p.head_dim_v, tile, w);
  write_rows<Op, C, kPacked>(dk, a.p.scale, address(shared.k), a.dk, a.p.dk, a.p.dk_strides,
                             a.p.head_dim, tile, w);
  ptx::bulk_wait_read<0>();
}

}  // namespace flashsci::sm90
