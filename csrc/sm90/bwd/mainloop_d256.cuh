// The consumer warpgroups of the sm90 backward at head dims above 128.
//
// Maths     As in kernel.cuh, for 64 keys and blocks of 64 queries.
// Roles     Consumer 0 computes S^T, P^T and dV, consumer 1 dP^T, dS^T and dK, for the 64 keys of
//           this CTA; each computes a quarter of the columns of dQ, for the 128 keys of the cluster.
// Shared    BackwardStorage<D256BackwardTiling> (config_d256.cuh): P^T goes from consumer 0 to 1 in
//           register order, dS to both and to the other CTA.
// Pipeline  dV and dK take P^T and dS^T from registers. dQ comes one block late: the tensor core
//           computes it during the exponentials, dS of the other CTA has a block's time to arrive,
//           and the copy engine has half of that for each piece of dQ.
// Limits    docs/develop/kernels/sm90_backward.md.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/cluster.cuh"
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
  static constexpr int kBox = 64 * 128;               // bytes of 64 rows of 64 columns
  static constexpr int kOwned = C::owned_columns(w);  // columns of dQ
  static constexpr int kPieces = kOwned / C::kPieceColumns;
  using MmaS = typename Op::template Wgmma<64>;
  using MmaDq = typename Op::template Wgmma<kOwned>;

  BackwardStorage<C>& shared;
  const BackwardArgs& a;
  const KeyTile& tile;
  float (&sum)[kSumColumns / 2];  // dV or dK
  const uint32_t rank;
  const int begin_block, end_block, iters;
  int block;
  int full_begin = 0, full_end = 0;  // blocks of queries that see all of the keys
  float x[32];                       // S^T or dP^T
  uint32_t p[4][4];                  // P^T or dS^T as operand, per 16 queries
  float dq[kOwned / 2];
  // Descriptors of operands: rows as they are, or transposed.
  uint64_t key_rows, q_rows, dout_rows, q_columns, dout_columns, k_columns, peer_k_columns, ds_rows;
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
        rank(ptx::redux_max(static_cast<int>(ptx::cluster_rank()))),
        begin_block(ptx::redux_max(tile.begin)),
        end_block(ptx::redux_max(tile.end)),
        iters((end_block - begin_block) * (a.p.heads_q / a.p.heads_k)),
        block(begin_block) {
    key_rows = ptx::wgmma_descriptor(address(w == 0 ? shared.k : shared.v), 16, 1024);
    q_rows = ptx::wgmma_descriptor(address(shared.q), 16, 1024);
    dout_rows = ptx::wgmma_descriptor(address(shared.dout), 16, 1024);
    q_columns = ptx::wgmma_descriptor(address(shared.q), kBox, 1024);
    dout_columns = ptx::wgmma_descriptor(address(shared.dout), kBox, 1024);
    const int begin = C::dq_begin(rank, w);
    const uint32_t within = begin % 64 * 2, peer_box = C::kPeerBoxes == 1 ? 0 : w;
    k_columns = ptx::wgmma_descriptor(address(shared.k) + begin / 64 * kBox + within, kBox, 1024);
    peer_k_columns =
        ptx::wgmma_descriptor(address(shared.peer_k) + peer_box * kBox + within, kBox, 1024);
    ds_rows = ptx::wgmma_descriptor(address(shared.ds), 16, 1024);
    ds_store = address(shared.ds) + (lane() % 8 + lane() / 16 * 8) * 128 +
               ((2 * warp() + lane() / 8 % 2) ^ (lane() % 8)) * 16;
    p_store = address(shared.p) + thread_bytes();
    dq_store = address(shared.dq[0][w]) + thread_bytes();
    if constexpr (w == 0) {
      const Window window = window_of(a.p, tile.seq_q, tile.seq_k);
      const int first_query = max(row() + 64 - window.after, 0);
      const bool all = row() + 64 <= tile.seq_k;
      full_begin = ptx::redux_max(all ? (first_query + 63) / 64 : INT32_MAX);
      full_end = ptx::redux_max(max(row() - window.before + 1, 0) / 64);
    }
  }

  __device__ __forceinline__ int row() const { return tile.row + rank * C::kKeys; }  // of keys
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
  __device__ __forceinline__ void meet() {
    release(shared.met);
    wait_for(shared.met, 0);
  }

  // x = (rows of K or V) (rows of Q or dO)^T
  __device__ __forceinline__ void issue_product(uint64_t streamed) {
#pragma unroll
    for (int d = 0; d < kColumns / 16; ++d)
      MmaS::template ss<0>(x, key_rows + (d / 4 * kBox + d % 4 * 32) / 16,
                           streamed + (d / 4 * kBox + d % 4 * 32) / 16, d > 0);
    ptx::wgmma_commit();
  }
  // dQ from dS of this index, own and the peer's, when both are there.
  __device__ __forceinline__ void issue_dq(int index) {
    const uint32_t stage = index % C::kDsStages, time = index / C::kDsStages;
    const uint64_t rows = ds_rows + stage * (2 * C::kDsBytes / 16);
    wait_for(shared.ds_full[stage], time);
    wait_for(shared.peer_ds_full[stage], time);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const uint64_t columns = n < 4 ? k_columns : peer_k_columns;
      MmaDq::template ss<1>(dq, rows + (n / 4 * C::kDsBytes + n % 4 * 32) / 16,
                            columns + n % 4 * (2048 / 16), n > 0);
    }
    ptx::wgmma_commit();
  }
  // This warp has read dS of this index: its own and the peer's.
  __device__ __forceinline__ void free_ds(int index) {
    const uint32_t empty = address(&shared.ds_empty[index % C::kDsStages]);
    __syncwarp();
    if (lane() == 0) {
      ptx::mbarrier_arrive(empty);
      ptx::mbarrier_arrive_there(ptx::map_shared(empty, rank ^ 1));
    }
  }
  __device__ __forceinline__ void write_dq(int index, int piece) {
    wait_for(shared.dq_empty[0][w], index * kPieces + piece + 1);
    poison_pieces(dq_store, C::kPieceColumns / 8, 2048);
#pragma unroll
    for (int j = 0; j < C::kPieceColumns / 8; ++j) {
      const float* x = dq + (piece * C::kPieceColumns / 8 + j) * 4;
      ptx::st_shared(dq_store + j * 2048, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]),
                                                     __float_as_uint(x[2]), __float_as_uint(x[3])));
    }
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
      hide(of, window_of(a.p, tile.seq_q, tile.seq_k), row() + warp() * 16 + lane() / 4,
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
    issue_dq(iter);  // of the previous block
    ptx::wgmma_wait<1>();
    ptx::wgmma_tie(x);
    exponentiate(iter);
    release(shared.q_empty[stage]);
    wait_for(shared.dout_full[dout_stage], iter / C::kDoutStages);
    ptx::wgmma_fence();
    issue_sum<Op>(sum, p, dout_columns + dout_stage * (C::kDoutBytes / 16), 0, 4);
    ptx::wgmma_wait<1>();
    ptx::wgmma_tie(dq);
    free_ds(iter);
    write_dq(iter, 0);
    ptx::wgmma_wait<0>();
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
    if constexpr (C::kDsStages == 1) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(dq);
      free_ds(iter);
    }
    const uint32_t index = iter + 1, ds_stage = index % C::kDsStages;
    const uint32_t store = ds_store + ds_stage * (2 * C::kDsBytes);
    wait_for(shared.ds_empty[ds_stage], index / C::kDsStages + 1);
    poison_pieces(store, 4, 2048);
#pragma unroll
    for (int m = 0; m < 4; ++m) ptx::stmatrix_x4_trans(store + m * 2048, p[m]);
    ptx::fence_proxy_async();
    // Not before: loads of P and delta may be in flight until dS has been computed from them.
    release(shared.p_empty);
    release(shared.dout_empty[dout_stage]);
    release(shared.ds_full[ds_stage]);
    // All of dS: its place in the other CTA is free, too.
    ptx::barrier_sync(kAllConsumers, 128);
    if (warp() == 0 && ptx::elect()) {
      const uint32_t full = address(&shared.peer_ds_full[ds_stage]);
      ptx::mbarrier_arrive_expect(full, sizeof(shared.ds[0][0]));
      ptx::bulk_send(ptx::map_shared(address(shared.ds[ds_stage][1]), rank ^ 1),
                     address(shared.ds[ds_stage][0]), C::kDsBytes, ptx::map_shared(full, rank ^ 1));
    }
  }
  // Consumer 1: dP^T, dS^T, dK.
  __device__ __forceinline__ void multiply_by_ds(int iter) {
    const uint32_t stage = iter % C::kStages, dout_stage = iter % C::kDoutStages;
    wait_for(shared.dout_full[dout_stage], iter / C::kDoutStages);
    ptx::wgmma_fence();
    issue_product(dout_rows + dout_stage * (C::kDoutBytes / 16));
    issue_dq(iter);  // of the previous block
    share_ds(iter, dout_stage);
    wait_for(shared.q_full[stage], iter / C::kStages);
    ptx::wgmma_fence();
    issue_sum<Op>(sum, p, q_columns + stage * (C::kQBytes / 16), 0, 4);
    if constexpr (C::kDsStages > 1) {
      ptx::wgmma_wait<1>();
      ptx::wgmma_tie(dq);
      free_ds(iter);
    }
    write_dq(iter, 0);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(sum);
    release(shared.q_empty[stage]);
  }

  __device__ __forceinline__ void run() {
    if constexpr (w == 1) {  // index 0 is there
      release(shared.ds_full[0]);
      if (warp() == 0 && ptx::elect()) ptx::mbarrier_arrive(address(&shared.peer_ds_full[0]));
    }
    wait_for(shared.kv_full, 0);
#pragma unroll 1
    for (int iter = 0; iter < iters; ++iter) {
      if constexpr (w == 0)
        multiply_by_p(iter);
      else
        multiply_by_ds(iter);
      if constexpr (kPieces > 1) write_dq(iter, 1);
    }
    ptx::wgmma_fence();
    issue_dq(iters);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(dq);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) write_dq(iters, piece);
    meet();  // K and V have been read
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
  constexpr int kPitch = C::kKeys * 128;
  const int row = tile.row + ptx::cluster_rank() * C::kKeys;
  const uint32_t staged = ptx::shared_address(w == 0 ? shared.v : shared.k);
  stage_rows<Op>(sum, w == 0 ? 1.f : a.p.scale, staged, kPitch);
  ptx::fence_proxy_async();
  ptx::barrier_sync(kConsumer + w, 128);
  if constexpr (w == 0)
    send_rows<C::kBoxesV, kVarlen>(staged, kPitch, a.dv, a.p.dv, a.p.dv_strides, a.p.head_dim_v,
                                   tile, row);
  else
    send_rows<C::kBoxes, kVarlen>(staged, kPitch, a.dk, a.p.dk, a.p.dk_strides, a.p.head_dim, tile,
                                  row);
  ptx::bulk_wait_read<0>();
}

}  // namespace flashsci::sm90::bwd
