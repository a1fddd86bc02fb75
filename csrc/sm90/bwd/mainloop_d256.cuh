// The consumer warpgroups of the sm90 backward at head dims above 128.
//
// Maths     as in kernel.cuh, of 64 keys and blocks of 64 queries.
// Roles     Consumer 0 computes S^T, P^T and dV, consumer 1 dP^T, dS^T and dK, and each half of the
//           columns of dQ.
// Shared    BackwardStorage<D256BackwardTiling> (config_d256.cuh): P^T goes from consumer 0 to 1 as
//           it is in registers, dS to both.
// Pipeline  dV and dK take P^T and dS^T from registers. dQ comes in two slices of columns, the
//           second one block late: the tensor core has it while the exponentials are computed, and
//           the copy engine has half of a block's time for each.
// Limits    docs/kernels/sm90_backward.md.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/redux.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/stmatrix.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../../ptx/wgmma.cuh"
#include "config.cuh"
#include "config_d256.cuh"
#include "mainloop.cuh"

namespace flashsci::sm90::bwd {

// Accumulator element e of a lane is key 16 warp + lane / 4 + 8 ((e >> 1) & 1) and query 8 (e >> 2)
// + 2 (lane % 4) + (e & 1) of the block.
template <class Op, class C, bool kVarlen, bool kSoftcap, int w>
__device__ __forceinline__ void consume_d256(BackwardStorage<C>& shared, const BackwardArgs& a) {
  constexpr int kColumns = w == 0 ? C::kHeadDim : C::kHeadDimV;     // of the product of rows
  constexpr int kSumColumns = w == 0 ? C::kHeadDimV : C::kHeadDim;  // of dV or dK
  constexpr int kBox = 64 * 128;  // bytes of 64 rows of 64 columns
  constexpr int kFirst = C::slice_begin(w, 0), kLast = C::slice_begin(w, 1);  // slices of dQ
  using MmaS = typename Op::template Wgmma<64>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const auto address = [](const void* x) { return ptx::shared_address(x); };

  float sum[kSumColumns / 2];  // dV or dK
#pragma unroll
  for (int e = 0; e < kSumColumns / 2; ++e) sum[e] = 0.f;

  const KeyTile& tile = shared.tile[0];
  const int begin_block = ptx::redux_max(tile.begin), end_block = ptx::redux_max(tile.end);
  const int iters = (end_block - begin_block) * (a.p.heads_q / a.p.heads_k);
  if (iters > 0) {
    float x[32];  // S^T or dP^T
    float dq_first[C::slice_columns(w, 0) / 2], dq_last[C::slice_columns(w, 1) / 2];

    uint32_t p[4][4];  // P^T or dS^T as operand, per 16 queries
    const auto keys = w == 0 ? shared.k : shared.v;
    const uint64_t key_rows = ptx::wgmma_descriptor(address(keys), 16, 1024);
    const uint64_t q_rows = ptx::wgmma_descriptor(address(shared.q), 16, 1024);
    const uint64_t dout_rows = ptx::wgmma_descriptor(address(shared.dout), 16, 1024);
    const uint64_t q_columns = ptx::wgmma_descriptor(address(shared.q), kBox, 1024);
    const uint64_t dout_columns = ptx::wgmma_descriptor(address(shared.dout), kBox, 1024);
    const uint64_t k_columns = ptx::wgmma_descriptor(address(shared.k), kBox, 1024);
    const uint64_t ds_rows = ptx::wgmma_descriptor(address(shared.ds), 16, 1024);
    const uint32_t ds_store = address(shared.ds) + (lane % 8 + lane / 16 * 8) * 128 +
                              ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
    const uint32_t thread = threadIdx.x % 128 * 16;
    const uint32_t p_store = address(shared.p) + thread;
    const uint32_t dq_store = address(shared.dq[0][w]) + thread;
    const uint32_t lse = address(shared.lse) + lane % 4 * 8;
    const uint32_t delta = address(shared.delta) + lane % 4 * 8;

    // x = (rows of K or V) (rows of Q or dO)^T
    const auto issue_product = [&](uint64_t streamed) {
#pragma unroll
      for (int d = 0; d < kColumns / 16; ++d)
        MmaS::template ss<0>(x, key_rows + (d / 4 * kBox + d % 4 * 32) / 16,
                             streamed + (d / 4 * kBox + d % 4 * 32) / 16, d > 0);
      ptx::wgmma_commit();
    };
    const auto issue_dq = [&](auto& dq, int iter, int begin) {
      constexpr int kDqColumns = sizeof(dq) / 2;
      const uint64_t rows = ds_rows + iter % 2 * (kBox / 16);
      const uint64_t columns = k_columns + (begin / 64 * kBox + begin % 64 * 2) / 16;
#pragma unroll
      for (int n = 0; n < 4; ++n)
        Op::template Wgmma<kDqColumns>::template ss<1>(dq, rows + n * (32 / 16),
                                                       columns + n * (2048 / 16), n > 0);
      ptx::wgmma_commit();
    };
    const auto release = [&](uint64_t& barrier) {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(address(&barrier));
    };
    // The consumers wait for each other. (A named barrier that is reached from two places in the
    // code, as their roles are, is an error to compute-sanitizer's synccheck.)
    const auto meet = [&](uint32_t time) {
      release(shared.met);
      wait_for(shared.met, time);
    };
    const auto write_dq = [&](const auto& dq, int count) {
      wait_for(shared.dq_empty[0][w], count + 1);
      poison_pieces(dq_store, int{sizeof(dq)} / 16, 2048);
#pragma unroll
      for (int j = 0; j < int{sizeof(dq)} / 16; ++j)
        ptx::st_shared(dq_store + j * 2048,
                       make_uint4(__float_as_uint(dq[j * 4]), __float_as_uint(dq[j * 4 + 1]),
                                  __float_as_uint(dq[j * 4 + 2]), __float_as_uint(dq[j * 4 + 3])));
      ptx::fence_proxy_async();
      release(shared.dq_full[0][w]);
    };

    // Blocks [full_begin, full_end) see all of the keys.
    int full_begin = 0, full_end = 0;
    if constexpr (w == 0) {
      const Window window = window_of(a.p, tile.seq_q, tile.seq_k);
      const int first_query = max(tile.row + 64 - window.after, 0);
      const bool all = tile.row + 64 <= tile.seq_k;
      full_begin = ptx::redux_max(all ? (first_query + 63) / 64 : INT32_MAX);
      full_end = ptx::redux_max(max(tile.row - window.before + 1, 0) / 64);
    }
    int block = begin_block;
    // P^T as operand, and, times the slope of softcap, for dS^T.
    const auto exponentiate = [&](int iter) {
      const uint32_t stage = iter % C::kStages;
      const auto hide_outside = [&](float value) {
        const bool large = !kSoftcap && flag_of(lse + stage * 256);
        if (block < full_begin || block >= full_end || large) {
          if constexpr (!kSoftcap) limit_probabilities(x);
          hide(x, window_of(a.p, tile.seq_q, tile.seq_k), tile.row + warp * 16 + lane / 4,
               block * 64 + lane % 4 * 2, value);
        }
      };
      float tanh[kSoftcap ? 32 : 1];
      if constexpr (kSoftcap) {
#pragma unroll
        for (int e = 0; e < 32; ++e) x[e] = tanh_accurate(x[e] * a.cap_inner);
        hide_outside(-INFINITY);
#pragma unroll
        for (int e = 0; e < 32; ++e) tanh[e] = x[e];
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 row = ptx::ld_shared_f2(lse + stage * 256 + n * 32);
#pragma unroll
        for (int e = n * 4; e < n * 4 + 4; ++e)
          x[e] = ptx::ex2_approx(
              fmaf(x[e], kSoftcap ? a.cap_outer : a.exp_scale, e % 2 == 0 ? -row.x : -row.y));
      }
      if constexpr (!kSoftcap) hide_outside(0.f);
      if (++block == end_block) block = begin_block;
#pragma unroll
      for (int e = 0; e < 32; e += 2) p[e / 8][e / 2 % 4] = Op::pack2(x[e], x[e + 1]);
      if constexpr (kSoftcap) {
#pragma unroll
        for (int e = 0; e < 32; ++e) x[e] *= fmaxf(fmaf(-tanh[e], tanh[e], 1.f), 0.f);
      }
      wait_for(shared.p_empty, iter + 1);
      poison_pieces(p_store, 4, 2048);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const auto word = [&](int i) {
          return kSoftcap ? Op::pack2(x[m * 8 + i * 2], x[m * 8 + i * 2 + 1]) : p[m][i];
        };
        ptx::st_shared(p_store + m * 2048, make_uint4(word(0), word(1), word(2), word(3)));
      }
      release(shared.p_full);
    };

    // What the first turn takes for dS of the block before it.
#pragma unroll
    for (int i = 0; i < 2; ++i)
      ptx::st_shared(address(shared.ds[1]) + (w * 2 + i) * 2048 + thread, make_uint4(0, 0, 0, 0));
    ptx::fence_proxy_async();
    meet(0);
    wait_for(shared.kv_full, 0);
#pragma unroll 1
    for (int iter = 0; iter < iters; ++iter) {
      const uint32_t stage = iter % C::kStages, at = stage * (C::kQBytes / 16);
      const uint32_t dout_stage = iter % C::kDoutStages,
                     dout_at = dout_stage * (C::kDoutBytes / 16);
      if constexpr (w == 0) {
        wait_for(shared.q_full[stage], iter / C::kStages);
        ptx::wgmma_fence();
        issue_product(q_rows + at);
        issue_dq(dq_last, iter + 1, kLast);  // of the block before
        ptx::wgmma_wait<1>();
        ptx::wgmma_tie(x);
        exponentiate(iter);
        release(shared.q_empty[stage]);
        wait_for(shared.dout_full[dout_stage], iter / C::kDoutStages);
        ptx::wgmma_fence();
        issue_sum<Op>(sum, p, dout_columns + dout_at, 0, 4);
        ptx::wgmma_wait<1>();
        ptx::wgmma_tie(dq_last);
        write_dq(dq_last, 2 * iter);
        wait_for(shared.ds_full, iter);
        ptx::wgmma_fence();
        issue_dq(dq_first, iter, kFirst);
        ptx::wgmma_wait<1>();
        ptx::wgmma_tie(sum);
        release(shared.dout_empty[dout_stage]);
      } else {
        wait_for(shared.dout_full[dout_stage], iter / C::kDoutStages);
        ptx::wgmma_fence();
        issue_product(dout_rows + dout_at);
        issue_dq(dq_last, iter + 1, kLast);  // of the block before
        wait_for(shared.p_full, iter);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const uint4 words = ptx::ld_shared_v4(p_store + m * 2048);
          p[m][0] = words.x, p[m][1] = words.y, p[m][2] = words.z, p[m][3] = words.w;
        }
        release(shared.p_empty);
        ptx::wgmma_wait<1>();
        ptx::wgmma_tie(x);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float2 row = ptx::ld_shared_f2(delta + dout_stage * 256 + n * 32);
#pragma unroll
          for (int e = n * 4; e < n * 4 + 4; e += 2) {
            uint32_t& pair = p[e / 8][e / 2 % 4];
            pair = Op::pack2(Op::to_float(static_cast<uint16_t>(pair)) * (x[e] + row.x),
                             Op::to_float(static_cast<uint16_t>(pair >> 16)) * (x[e + 1] + row.y));
          }
        }
        release(shared.dout_empty[dout_stage]);
        wait_for(shared.ds_empty, iter + 1);
        poison_pieces(ds_store + iter % 2 * kBox, 4, 2048);
#pragma unroll
        for (int m = 0; m < 4; ++m)
          ptx::stmatrix_x4_trans(ds_store + iter % 2 * kBox + m * 2048, p[m]);
        ptx::fence_proxy_async();
        release(shared.ds_full);
        wait_for(shared.q_full[stage], iter / C::kStages);
        ptx::wgmma_fence();
        issue_sum<Op>(sum, p, q_columns + at, 0, 4);
        ptx::wgmma_wait<1>();
        ptx::wgmma_tie(dq_last);
        write_dq(dq_last, 2 * iter);
        wait_for(shared.ds_full, iter);
        ptx::wgmma_fence();
        issue_dq(dq_first, iter, kFirst);
        ptx::wgmma_wait<1>();
        ptx::wgmma_tie(sum);
        release(shared.q_empty[stage]);
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(dq_first);
      if constexpr (w == 0) release(shared.ds_empty);
      write_dq(dq_first, 2 * iter + 1);
    }
    ptx::wgmma_fence();
    issue_dq(dq_last, iters + 1, kLast);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(dq_last);
    write_dq(dq_last, 2 * iters);
    meet(1);  // nobody reads K or V any more
  }
  constexpr int kPitch = C::kBlockK * 128;
  const uint32_t staged = address(w == 0 ? shared.v : shared.k);
  stage_rows<Op>(sum, w == 0 ? 1.f : a.p.scale, staged, kPitch);
  ptx::fence_proxy_async();
  ptx::barrier_sync(1 + w, 128);
  if constexpr (w == 0)
    send_rows<C::kBoxesV, kVarlen>(staged, kPitch, a.dv, a.p.dv, a.p.dv_strides, a.p.head_dim_v,
                                   tile, tile.row);
  else
    send_rows<C::kBoxes, kVarlen>(staged, kPitch, a.dk, a.p.dk, a.p.dk_strides, a.p.head_dim, tile,
                                  tile.row);
  ptx::bulk_wait_read<0>();
}

}  // namespace flashsci::sm90::bwd
