// A consumer warpgroup of the sm90 triangle attention: 64 query rows of a member, unit after unit,
// from S to the stores.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/fence.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../../ptx/wgmma.cuh"
#include "../fwd/bias_mask.cuh"
#include "bias.cuh"
#include "config.cuh"
#include "load.cuh"
#include "schedule.cuh"
#include "softmax.cuh"

namespace flashsci::sm90::triangle_fwd {

// Descriptor of a tile of rows of 64 bytes in 64-byte swizzle, 512-byte aligned as TMA writes it;
// its second dimension takes one box, so that no block_bytes are needed (ptx/wgmma.cuh). start: its
// address below 2^18 / 16; descriptors differ only in this word.
__device__ __forceinline__ uint64_t narrow_descriptor(uint32_t start) {
  return static_cast<uint64_t>(512 >> 4 | 2u << 30) << 32 | start;
}

template <class Op, class C>
struct Consumer {
  static constexpr int kBlockK = C::kBlockK, kHeadDim = C::kHeadDim;
  using MmaQK = typename Op::template Wgmma<kBlockK>;
  using MmaPV = typename Op::template Wgmma<kHeadDim>;

  SharedStorage<C>& shared;
  const Args& a;
  const int w;  // the consumer
  const int lane, warp_row;
  const uint32_t k_start, v_start;         // of the first stages, for descriptors
  const uint32_t kv_full, kv_empty, info;  // addresses of the first stages
  const bool prepared;                     // the bias is prepared (bias.cuh)
  const uint32_t bias_ready;               // barrier of its first stage

  float s[kBlockK / 2];         // scores
  float o[kHeadDim / 2];        // output, unnormalised
  uint32_t p[kBlockK / 16][4];  // P as operand, per 16 keys
  uint32_t q[kHeadDim / 16][4];
  RowStatistics rows;
  KeyRing<C> keys;
  int member;         // index in the unit
  uint32_t used = 0;  // the barrier of Q, or of K and V, that products in flight read
  BiasRing<C> bias;

  __device__ __forceinline__ Consumer(SharedStorage<C>& shared_, const Args& a_, int w_)
      : shared(shared_),
        a(a_),
        w(w_),
        lane(threadIdx.x % 32),
        warp_row(threadIdx.x / 32 % 4 * 16),
        k_start(ptx::shared_address(shared_.k[w_ / C::kRowTiles]) / 16),
        v_start(ptx::shared_address(shared_.v[w_ / C::kRowTiles]) / 16),
        kv_full(ptx::shared_address(shared_.kv_full[w_ / C::kRowTiles])),
        kv_empty(ptx::shared_address(shared_.kv_empty[w_ / C::kRowTiles])),
        info(ptx::shared_address(shared_.info[w_ / C::kRowTiles])),
        prepared(C::kPrepares && a_.plan.resident != 0),
        bias_ready(ptx::shared_address(prepared ? shared_.bias_prepared : shared_.bias_full)) {}

  __device__ __forceinline__ void release(uint32_t barrier) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void release(uint64_t& barrier) const {
    release(ptx::shared_address(&barrier));
  }
  __device__ __forceinline__ void wait(uint64_t& barrier, uint32_t phase) const {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), phase);
  }

  __device__ __forceinline__ void start_unit(uint32_t phase) {
    wait(shared.q_full[w], phase);
    const uint32_t tile = ptx::shared_address(shared.q[w]);
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d)
      ptx::ldmatrix_x4(q[d], tile + fwd::swizzled<64>(warp_row + lane % 16, d * 2 + lane / 16));
    used = ptx::shared_address(&shared.q_empty[w]);  // released when the first product has read q
#pragma unroll
    for (int e = 0; e < kHeadDim / 2; ++e) o[e] = 0.f;
    rows.sum[0] = rows.sum[1] = 0.f;
  }
  // For a resident bias the consumers prepare blocks in turn, at the first unit of a tile.
  __device__ __forceinline__ void prepare() const {
#pragma unroll 1
    for (int block = w; block < a.plan.blocks; block += C::kConsumers) {
      wait(shared.bias_full[block], bias.phase);
      prepare_bias<Op, C>(ptx::shared_address(shared.bias[block]), a.plan.bias_factor, 1 + w);
      ptx::fence_proxy_async();  // before the copy engine writes there again
      release(shared.bias_prepared[block]);
    }
  }
  __device__ __forceinline__ void wait_bias() const {
    ptx::mbarrier_wait(bias_ready + bias.stage * 8, bias.phase);
  }
  // Releases the bias of blocks that the member does not see.
  __device__ __forceinline__ void skip_bias(int count, bool frees_bias) {
#pragma unroll 1
    for (; count > 0; --count, bias.next()) {
      if (!frees_bias) continue;
      wait_bias();
      release(shared.bias_empty[bias.stage]);
    }
  }
  // S starts from the bias.
  __device__ __forceinline__ void start_scores() {
    wait_bias();
    const uint32_t stage = ptx::shared_address(shared.bias[bias.stage]);
    if (prepared)
      read_prepared_bias<C>(s, stage);
    else
      read_bias<Op, C>(s, stage + C::kBiasStart + w % C::kRowTiles * C::kBiasTileBytes,
                       a.plan.bias_factor);
  }
  // S += Q K^T
  __device__ __forceinline__ void issue_qk() {
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d)
      MmaQK::template rs<0>(
          s, q[d], narrow_descriptor(k_start + keys.stage * (C::Rows::kBytes / 16) + d * 2), 1);
    ptx::wgmma_commit();
  }
  // O += P V
  __device__ __forceinline__ void issue_pv() {
#pragma unroll
    for (int n = 0; n < kBlockK / 16; ++n)
      MmaPV::template rs<1>(
          o, p[n],
          narrow_descriptor(v_start + keys.stage * (C::Rows::kBytes / 16) + n * C::Rows::kRowBytes),
          1);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void wait_products() {
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(s);
    ptx::wgmma_tie(o);
  }
  // P from S. first: no row has an offset yet.
  __device__ __forceinline__ void softmax(bool first) {
    float maximum[2], sum[2];
    if (first) start_offsets(rows, s, maximum, a.plan.exp_scale);
    exponentials<Op, false>(p, s, rows, a.plan.exp_scale, sum);
    if (overflows(sum)) {
      softmax_carefully<Op>(p, s, o, rows, a.plan.exp_scale);
    } else {
      rows.sum[0] += sum[0];
      rows.sum[1] += sum[1];
    }
  }
  // The next block that the member sees; `block` becomes it. Returns whether it is the last one. P
  // V of the previous block is in flight on entry (except for the first), that of this one on
  // return.
  __device__ __forceinline__ bool step(int& block, bool frees_bias) {
    const int before = block;
    ptx::mbarrier_wait(kv_full + keys.stage * 8, keys.phase);
    const uint4 given = ptx::ld_shared_v4(info + keys.stage * static_cast<int>(sizeof(BlockInfo)));
    const int block_last = ptx::redux_max(static_cast<int>(given.z));  // to uniform registers
    block = block_last >> 1;
    skip_bias(block - before - 1, frees_bias);
    start_scores();
    ptx::wgmma_fence();
    issue_qk();
    wait_products();
    // Not before: loads of q and bias may still be in flight until a product has read them.
    release(used);
    if (frees_bias) release(shared.bias_empty[bias.stage]);
    bias.next();
    used = kv_empty + keys.stage * 8;
    member = static_cast<int>(given.w);
    const uint32_t shown[2] = {given.x, given.y};
    if (__any_sync(0xffffffffu, (given.x & given.y) != 0xffffffffu)) hide_keys(s, shown);
    softmax(before < 0);
    ptx::wgmma_fence();
    issue_pv();
    keys.next();
    return block_last & 1;
  }

  // Normalises, writes lse and the output: every warp stages its rows in its own part of shared
  // memory and the copy engine stores them.
  __device__ __forceinline__ void write(const UnitWalk<C>& walk) {
    const int row = ptx::redux_max(walk.row + w % C::kRowTiles * 64 + warp_row);
    const int rows_left = a.p.seq_q - row;
    if (rows_left <= 0) return;
    const Batch at = walk.batch(ptx::redux_max(member));
    // In 32 bits: units are fewer than 2^30.
    const uint32_t batch_head =
        (at.batch0 * static_cast<uint32_t>(a.p.batch1) + at.batch1) * a.p.heads_q + walk.head;
    float* lse = a.p.lse + uint64_t{batch_head} * static_cast<uint32_t>(a.p.seq_q) + row + lane / 4;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(rows.sum[half]);
      inverse[half] = sum == 0.f ? 0.f : ptx::rcp_approx(sum);
      if (lane % 4 == 0 && lane / 4 + 8 * half < rows_left)
        lse[8 * half] =
            sum == 0.f ? -INFINITY : (rows.row_max_log2[half] + ptx::lg2_approx(sum)) * kLn2;
    }
    const uint32_t target = ptx::shared_address(shared.staging[w * 4 + warp_row / 16]);
    ptx::bulk_wait_read<0>();
    __syncwarp();
    poison_warp(target, C::OutRows::kBytes);
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) {
      const int e = j * 8;
      ptx::stmatrix_x4(target + fwd::swizzled<64>(lane % 16, j * 2 + lane / 16),
                       Op::pack2(o[e] * inverse[0], o[e + 1] * inverse[0]),
                       Op::pack2(o[e + 2] * inverse[1], o[e + 3] * inverse[1]),
                       Op::pack2(o[e + 4] * inverse[0], o[e + 5] * inverse[0]),
                       Op::pack2(o[e + 6] * inverse[1], o[e + 7] * inverse[1]));
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (ptx::elect()) {
      ptx::tma_store_5d(&a.out, target, 0, row, walk.head, at.batch1, at.batch0);
      ptx::bulk_commit();
    }
  }

  __device__ __forceinline__ void run() {
    uint32_t phase = 0;
    bool enters_tile = true;
#pragma unroll 1
    for (UnitWalk<C> walk(a); walk.more(); walk.next(), phase ^= 1) {
      const bool leaves_tile = walk.leaves_tile();
      const bool frees_bias = a.plan.resident == 0 || leaves_tile;
      if constexpr (C::kPrepares)
        if (a.plan.resident && enters_tile) prepare();
      enters_tile = leaves_tile;
      start_unit(phase);
      int block = -1;
#pragma unroll 1
      while (!step(block, frees_bias)) {
      }
      wait_products();
      release(used);
      skip_bias(a.plan.blocks - 1 - block, frees_bias);
      if (a.plan.resident) bias.restart(a.plan, !leaves_tile);
      write(walk);
    }
    ptx::bulk_wait_read<0>();
  }
};

}  // namespace flashsci::sm90::triangle_fwd
