// The consumer warpgroups of the sm90 backward at head dims above 128.
//
// Maths     As in kernel.cuh, for 64 keys and blocks of 64 queries.
// Roles     Consumer 0 computes S^T, P^T and dV, consumer 1 dP^T, dS^T and dK; each computes half
//           of the columns of dQ.
// Shared    BackwardStorage<D256BackwardTiling> (config_d256.cuh): P^T goes from consumer 0 to 1 in
//           register order, dS to both.
// Pipeline  dV and dK take P^T and dS^T from registers. dQ comes in two slices of columns, the
//           second one block late: the tensor core computes it during the exponentials, and the
//           copy engine has half of a block's time for each slice.
// Limits    docs/develop/kernels/sm90_backward.md.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/fence.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../../ptx/wgmma.cuh"
#include "config.cuh"
#include "config_d256.cuh"
#include "mainloop.cuh"

namespace flashsci::sm90::bwd {

// Consumer w. Accumulator element e of a lane is key 16 warp + lane / 4 + 8 ((e >> 1) & 1) and
// query 8 (e >> 2) + 2 (lane % 4) + (e & 1) of the block.
template <class Op, class C, bool kVarlen, bool kSoftcap, int w>
struct D256Consumer {
  static constexpr int kColumns = w == 0 ? C::kHeadDim : C::kHeadDimV;     // inner dim of x
  static constexpr int kSumColumns = w == 0 ? C::kHeadDimV : C::kHeadDim;  // of dV or dK
  static constexpr int kBox = 64 * 128;  // bytes of 64 rows of 64 columns
  // Slices of dQ: their first columns, and this consumer's part of them.
  static constexpr int kFirst = C::slice_begin(w, 0), kLast = C::slice_begin(w, 1);
  using MmaS = typename Op::template Wgmma<64>;
  using FirstSlice = float[C::slice_columns(w, 0) / 2];
  using LastSlice = float[C::slice_columns(w, 1) / 2];

  BackwardStorage<C>& shared;
  const BackwardArgs& a;
  const KeyTile& tile;
  float (&sum)[kSumColumns / 2];  // dV or dK
  const int begin_block, end_block, iters;
  int block;
  int full_begin = 0, full_end = 0;  // blocks of queries that see all of the keys
  float x[32];                       // S^T or dP^T
  uint32_t p[4][4];                  // P^T or dS^T as operand, per 16 queries
  FirstSlice dq_first;
  LastSlice dq_last;
  // Descriptors of operands: rows as they are, or transposed.
  uint64_t key_rows, q_rows, dout_rows, q_columns, dout_columns, k_columns, ds_rows;
  uint32_t ds_store, p_store, dq_store;  // addresses that this lane writes

  __device__ __forceinline__ static uint32_t address(const void* x) {
    return ptx::shared_address(x);
  }
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int warp() { return threadIdx.x / 32 % 4; }
  __device__ __forceinline__ static uint32_t thread_bytes() { return threadIdx.x % 128 * 16; }

  __device__ __forceinline__ D256Consumer(BackwardStorage<C>& shared_, const BackwardArgs& a_,
                                          const KeyTile& tile_, float (&sum_)[kSumColumns / 2])
      : shared(shared_),
        a(a_),
        tile(tile_),
        sum(sum_),
        begin_block(ptx::redux_max(tile.begin)),
        end_block(ptx::redux_max(tile.end)),
        iters((end_block - begin_block) * (a.p.heads_q / a.p.heads_k)),
        block(begin_block) {
    key_rows = ptx::wgmma_descriptor(address(w == 0 ? shared.k : shared.v), 16, 1024);
    q_rows = ptx::wgmma_descriptor(address(shared.q), 16, 1024);
    dout_rows = ptx::wgmma_descriptor(address(shared.dout), 16, 1024);
    q_columns = ptx::wgmma_descriptor(address(shared.q), kBox, 1024);
    dout_columns = ptx::wgmma_descriptor(address(shared.dout), kBox, 1024);
    k_columns = ptx::wgmma_descriptor(address(shared.k), kBox, 1024);
    ds_rows = ptx::wgmma_descriptor(address(shared.ds), 16, 1024);
    ds_store = address(shared.ds) + (lane() % 8 + lane() / 16 * 8) * 128 +
               ((2 * warp() + lane() / 8 % 2) ^ (lane() % 8)) * 16;
    p_store = address(shared.p) + thread_bytes();
    dq_store = address(shared.dq[0][w]) + thread_bytes();
    if constexpr (w == 0) {
      const Window window = window_of(a.p, tile.seq_q, tile.seq_k);
      const int first_query = max(tile.row + 64 - window.after, 0);
      const bool all = tile.row + 64 <= tile.seq_k;
      full_begin = ptx::redux_max(all ? (first_query + 63) / 64 : INT32_MAX);
      full_end = ptx::redux_max(max(tile.row - window.before + 1, 0) / 64);
    }
  }

  // The addresses that this lane reads.
  __device__ __forceinline__ uint32_t lse() const { return address(shared.lse) + lane() % 4 * 8; }
  __device__ __forceinline__ uint32_t delta() const {
    return address(shared.delta) + lane() % 4 * 8;
  }

  __device__ __forceinline__ static void release(uint64_t& barrier) {
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(address(&barrier));
  }
  // The consumers wait for each other. (A named barrier that is reached from two places in the
  // code, one per role, is an error to compute-sanitizer's synccheck.)
  __device__ __forceinline__ void meet(uint32_t time) {
    release(shared.met);
    wait_for(shared.met, time);
  }

  // x = (rows of K or V) (rows of Q or dO)^T
  __device__ __forceinline__ void issue_product(uint64_t streamed) {
#pragma unroll
    for (int d = 0; d < kColumns / 16; ++d)
      MmaS::template ss<0>(x, key_rows + (d / 4 * kBox + d % 4 * 32) / 16,
                           streamed + (d / 4 * kBox + d % 4 * 32) / 16, d > 0);
    ptx::wgmma_commit();
  }
  template <int kCount>
  __device__ __forceinline__ void issue_dq(float (&dq)[kCount], int iter, int begin) {
    const uint64_t rows = ds_rows + iter % 2 * (kBox / 16);
    const uint64_t columns = k_columns + (begin / 64 * kBox + begin % 64 * 2) / 16;
#pragma unroll
    for (int n = 0; n < 4; ++n)
      Op::template Wgmma<kCount * 2>::template ss<1>(dq, rows + n * (32 / 16),
                                                     columns + n * (2048 / 16), n > 0);
    ptx::wgmma_commit();
  }
  template <int kCount>
  __device__ __forceinline__ void write_dq(const float (&dq)[kCount], int count) {
    wait_for(shared.dq_empty[0][w], count + 1);
    poison_pieces(dq_store, kCount / 4, 2048);
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j)
      ptx::st_shared(dq_store + j * 2048,
                     make_uint4(__float_as_uint(dq[j * 4]), __float_as_uint(dq[j * 4 + 1]),
                                __float_as_uint(dq[j * 4 + 2]), __float_as_uint(dq[j * 4 + 3])));
    ptx::fence_proxy_async();
    release(shared.dq_full[0][w]);
  }

  // P^T as operand; for dS^T it is multiplied by the slope of softcap.
  __device__ __forceinline__ void exponentiate(int iter) {
    const uint32_t stage = iter % C::kStages;
    float code[kSoftcap ? 32 : 1];  // of tanh
    if constexpr (kSoftcap) {
#pragma unroll
      for (int e = 0; e < 32; ++e) code[e] = tanh_code(x[e] * a.cap_inner);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 row = ptx::ld_shared_f2(lse() + stage * 256 + n * 32);
#pragma unroll
      for (int e = n * 4; e < n * 4 + 4; ++e) {
        const float offset = e % 2 == 0 ? row.x : row.y;
        if constexpr (kSoftcap)
          x[e] = ptx::ex2_approx(fmaf(tanh_of(code[e]), a.cap_outer, -offset));
        else
          x[e] = ptx::ex2_approx(fmaf(x[e], a.exp_scale, -offset));
      }
    }
    const bool large = !kSoftcap && flag_of(lse() + stage * 256);
    const bool cut = block < full_begin || block >= full_end || large;
    const auto hide_outside = [&](auto& of) {
      hide(of, window_of(a.p, tile.seq_q, tile.seq_k), tile.row + warp() * 16 + lane() / 4,
           block * 64 + lane() % 4 * 2);
    };
    if constexpr (!kSoftcap) {
      if (cut) {
        limit_probabilities(x);
        hide_outside(x);
      }
    }
#pragma unroll
    for (int e = 0; e < 32; e += 2) p[e / 8][e / 2 % 4] = Op::pack2(x[e], x[e + 1]);
    if constexpr (kSoftcap) {
#pragma unroll
      for (int e = 0; e < 32; ++e) x[e] *= slope_of(code[e]);
      if (cut) {
        hide_outside(x);
        hide_outside(p);
      }
    }
    if (++block == end_block) block = begin_block;
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
  }
  // Consumer 0: S^T, P^T, dV.
  __device__ __forceinline__ void multiply_by_p(int iter) {
    const uint32_t stage = iter % C::kStages, dout_stage = iter % C::kDoutStages;
    wait_for(shared.q_full[stage], iter / C::kStages);
    ptx::wgmma_fence();
    issue_product(q_rows + stage * (C::kQBytes / 16));
    issue_dq(dq_last, iter + 1, kLast);  // of the previous block
    ptx::wgmma_wait<1>();
    ptx::wgmma_tie(x);
    exponentiate(iter);
    release(shared.q_empty[stage]);
    wait_for(shared.dout_full[dout_stage], iter / C::kDoutStages);
    ptx::wgmma_fence();
    issue_sum<Op>(sum, p, dout_columns + dout_stage * (C::kDoutBytes / 16), 0, 4);
    ptx::wgmma_wait<1>();
    ptx::wgmma_tie(dq_last);
    write_dq(dq_last, 2 * iter);
    wait_for(shared.ds_full, iter);
    ptx::wgmma_fence();
    issue_dq(dq_first, iter, kFirst);
    ptx::wgmma_wait<1>();
    ptx::wgmma_tie(sum);
    release(shared.dout_empty[dout_stage]);
  }
  // P^T of consumer 0 and dP^T become dS^T: as operand, and in shared memory for both consumers.
  __device__ __forceinline__ void share_ds(int iter, uint32_t dout_stage) {
    wait_for(shared.p_full, iter);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const uint4 words = ptx::ld_shared_v4(p_store + m * 2048);
      p[m][0] = words.x, p[m][1] = words.y, p[m][2] = words.z, p[m][3] = words.w;
    }
    ptx::wgmma_wait<1>();
    ptx::wgmma_tie(x);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 row = ptx::ld_shared_f2(delta() + dout_stage * 256 + n * 32);
#pragma unroll
      for (int e = n * 4; e < n * 4 + 4; e += 2) {
        uint32_t& pair = p[e / 8][e / 2 % 4];
        pair = Op::pack2(Op::to_float(static_cast<uint16_t>(pair)) * (x[e] + row.x),
                         Op::to_float(static_cast<uint16_t>(pair >> 16)) * (x[e + 1] + row.y));
      }
    }
    wait_for(shared.ds_empty, iter + 1);
    poison_pieces(ds_store + iter % 2 * kBox, 4, 2048);
#pragma unroll
    for (int m = 0; m < 4; ++m) ptx::stmatrix_x4_trans(ds_store + iter % 2 * kBox + m * 2048, p[m]);
    ptx::fence_proxy_async();
    // Not before: loads of P and delta may be in flight until dS has been computed from them.
    release(shared.p_empty);
    release(shared.dout_empty[dout_stage]);
    release(shared.ds_full);
  }
  // Consumer 1: dP^T, dS^T, dK.
  __device__ __forceinline__ void multiply_by_ds(int iter) {
    const uint32_t stage = iter % C::kStages, dout_stage = iter % C::kDoutStages;
    wait_for(shared.dout_full[dout_stage], iter / C::kDoutStages);
    ptx::wgmma_fence();
    issue_product(dout_rows + dout_stage * (C::kDoutBytes / 16));
    issue_dq(dq_last, iter + 1, kLast);  // of the previous block
    share_ds(iter, dout_stage);
    wait_for(shared.q_full[stage], iter / C::kStages);
    ptx::wgmma_fence();
    issue_sum<Op>(sum, p, q_columns + stage * (C::kQBytes / 16), 0, 4);
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

  __device__ __forceinline__ void run() {
    // The first block takes this for dS of the block before it.
#pragma unroll
    for (int i = 0; i < 2; ++i)
      ptx::st_shared(address(shared.ds[1]) + (w * 2 + i) * 2048 + thread_bytes(),
                     make_uint4(0, 0, 0, 0));
    ptx::fence_proxy_async();
    meet(0);
    wait_for(shared.kv_full, 0);
#pragma unroll 1
    for (int iter = 0; iter < iters; ++iter) {
      if constexpr (w == 0)
        multiply_by_p(iter);
      else
        multiply_by_ds(iter);
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
    meet(1);  // K and V have been read
  }
};

template <class Op, class C, bool kVarlen, bool kSoftcap, int w>
__device__ __forceinline__ void consume_d256(BackwardStorage<C>& shared, const BackwardArgs& a) {
  using Consumer = D256Consumer<Op, C, kVarlen, kSoftcap, w>;
  float sum[Consumer::kSumColumns / 2];  // dV or dK
#pragma unroll
  for (int e = 0; e < Consumer::kSumColumns / 2; ++e) sum[e] = 0.f;
  const KeyTile& tile = shared.tile[0];
  // Equal in all lanes, which the compiler learns only from redux: wgmma needs uniform control
  // flow.
  if (ptx::redux_max(tile.end - tile.begin) > 0) Consumer(shared, a, tile, sum).run();
  constexpr int kPitch = C::kBlockK * 128;
  const uint32_t staged = ptx::shared_address(w == 0 ? shared.v : shared.k);
  stage_rows<Op>(sum, w == 0 ? 1.f : a.p.scale, staged, kPitch);
  ptx::fence_proxy_async();
  ptx::barrier_sync(kConsumer + w, 128);
  if constexpr (w == 0)
    send_rows<C::kBoxesV, kVarlen>(staged, kPitch, a.dv, a.p.dv, a.p.dv_strides, a.p.head_dim_v,
                                   tile, tile.row);
  else
    send_rows<C::kBoxes, kVarlen>(staged, kPitch, a.dk, a.p.dk, a.p.dk_strides, a.p.head_dim, tile,
                                  tile.row);
  ptx::bulk_wait_read<0>();
}

}  // namespace flashsci::sm90::bwd
