// The writing warps of the triangle backward: dQ of each consumer goes to its fp32 accumulator in
// global memory; dK and dV of a member are summed over the consumers and stored, or added to
// accumulators if other panels of queries have parts of them.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/fence.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"

namespace flashsci::sm90::triangle_bwd {

// dQ of consumer w, of all members. One thread. The first key tile of a head stores, so that the
// accumulator need not be cleared; the others add, once it has, or in turns once all before them
// have. The CTAs of a group run at the same time, and each waits for lower ones only.
template <class C>
__device__ __forceinline__ void add_dq(TriangleStorage<C>& shared, const TriangleArgs& a, int w) {
  ptx::wait_for_prerequisites();  // may still clear the turns
  const uint32_t source = ptx::shared_address(shared.dq[w]);
  const Work work(a, blockIdx.x);
  const int mine = static_cast<int>(a.p.deterministic ? work.key_block : min(work.key_block, 1u));
  const bool passes = a.p.deterministic || mine == 0;
  int* done = nullptr;  // the turn of a copy that may still be in flight
  uint32_t count = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < work.count; ++i) {
    sleep_for(shared.member_full[i % 2], i / 2);
    const uint32_t hidden = shared.member[i % 2].hidden;
    const uint32_t batch_head = shared.member[i % 2].batch_head;
    const uint64_t first = uint64_t{batch_head} * a.q_blocks;
    ptx::mbarrier_arrive_after(ptx::shared_address(&shared.member_empty[i % 2]),
                               hidden ^ batch_head);
    if (hidden && !passes) continue;
#pragma unroll 1
    for (int step = 0; step < C::kSteps; ++step) {
      const uint32_t block = work.panel * C::kPanelBlocks + step * kConsumers + w;
      const bool inside = static_cast<int>(block * kBlock) < a.p.seq_q;
      int* const turn = a.turns + first + block;
      if (inside) {  // the check takes as long as dQ may still need
        while (mine > 0 && ptx::load_acquire(turn) < mine) {
        }
        ptx::fence_proxy_async_global();
      }
      if (hidden) {
        if (inside) ptx::add_release(turn, 1);
        continue;
      }
      sleep_for(shared.dq_full[w], count);
      if (inside) {
        float* const target = a.dq_sums + (first + block) * kSumFloats;
        const uint32_t bytes = a.p.head_dim * kBlock * 4;
        if (mine == 0)
          ptx::bulk_store(target, source, bytes);
        else
          ptx::bulk_add_f32(target, source, bytes);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }
      arrive_at(shared.dq_empty[w]);
      ++count;
      if (inside && passes) {  // of the previous block, complete by now
        ptx::bulk_wait<1>();
        ptx::fence_proxy_async_global();
        if (done != nullptr) ptx::add_release(done, 1);
        done = turn;
      }
    }
  }
  ptx::bulk_wait<0>();
  ptx::fence_proxy_async_global();
  if (done != nullptr) ptx::add_release(done, 1);
}

// Stores the rounded sum of both consumers' parts in rows of 64 bytes in 64-byte swizzle. One warp.
template <class Op>
__device__ __forceinline__ void stage_sum(const float (&part)[kConsumers][kSumFloats], float scale,
                                          bool hidden, uint32_t rows) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t source = ptx::shared_address(part[0]) + lane * 16;
  const uint32_t target = rows + lane / 4 * 64 + lane % 4 * 4;
#pragma unroll 2
  for (uint32_t i = 0; i < 16; ++i) {  // 8 columns, 16 rows
    uint4 x = make_uint4(0, 0, 0, 0), y = x;
    if (!hidden) {
      x = ptx::ld_shared_v4(source + i * 512);
      y = ptx::ld_shared_v4(source + i * 512 + kSumBytes);
    }
    const auto sum = [&](uint32_t one, uint32_t other) {
      return (__uint_as_float(one) + __uint_as_float(other)) * scale;
    };
    const uint32_t at = target + i % 4 * 1024 + ((i / 4) ^ (lane / 8)) * 16;
    ptx::st_shared(at, Op::pack2(sum(x.x, y.x), sum(x.y, y.y)));
    ptx::st_shared(at + 512, Op::pack2(sum(x.z, y.z), sum(x.w, y.w)));
  }
}

// The same in fp32, in the place of the first part. One warp.
__device__ __forceinline__ void add_parts(const float (&part)[kConsumers][kSumFloats]) {
  const uint32_t at = ptx::shared_address(part[0]) + threadIdx.x % 32 * 16;
#pragma unroll 2
  for (uint32_t i = 0; i < 16; ++i) {
    const uint4 x = ptx::ld_shared_v4(at + i * 512),
                y = ptx::ld_shared_v4(at + i * 512 + kSumBytes);
    const auto sum = [](uint32_t one, uint32_t other) {
      return __float_as_uint(__uint_as_float(one) + __uint_as_float(other));
    };
    ptx::st_shared(at + i * 512,
                   make_uint4(sum(x.x, y.x), sum(x.y, y.y), sum(x.z, y.z), sum(x.w, y.w)));
  }
}

// dK and dV of all members. Called by a whole warp.
template <class Op, class C>
__device__ __forceinline__ void store_dk_dv(TriangleStorage<C>& shared, const TriangleArgs& a) {
  ptx::wait_for_prerequisites();  // may still clear the accumulators
  const bool lane0 = threadIdx.x % 32 == 0;
  const Work work(a, blockIdx.x);
  uint32_t count = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < work.count; ++i) {
    sleep_for(shared.member_full[i % 2], i / 2);
    const Member member = shared.member[i % 2];
    const bool hidden = member.hidden;
    __syncwarp();
    if (lane0)
      ptx::mbarrier_arrive_after(
          ptx::shared_address(&shared.member_empty[i % 2]),
          member.hidden ^ member.head ^ member.batch0 ^ member.batch1 ^ member.batch_head);
    if (!hidden) sleep_for(shared.sums_full, count++);
    if (a.panels == 1) {
      ptx::bulk_wait_read<0>();  // stores of the previous member
      __syncwarp();
      stage_sum<Op>(shared.dk, a.p.scale, hidden, ptx::shared_address(shared.rows[0]));
      stage_sum<Op>(shared.dv, 1.f, hidden, ptx::shared_address(shared.rows[1]));
      ptx::fence_proxy_async();
      __syncwarp();
      if (!hidden && lane0) arrive_at(shared.sums_empty);
      if (ptx::elect()) {
        const int key = work.key_block * kBlock;
        ptx::tma_store_5d(&a.dk, ptx::shared_address(shared.rows[0]), 0, key, member.head,
                          member.batch1, member.batch0);
        ptx::tma_store_5d(&a.dv, ptx::shared_address(shared.rows[1]), 0, key, member.head,
                          member.batch1, member.batch0);
        ptx::bulk_commit();
      }
    } else if (!hidden) {
      add_parts(shared.dk);
      add_parts(shared.dv);
      ptx::fence_proxy_async();
      __syncwarp();
      if (ptx::elect()) {
        const uint64_t tile = uint64_t{member.batch_head} * a.k_blocks + work.key_block;
        ptx::bulk_add_f32(a.dk_sums + tile * kSumFloats, ptx::shared_address(shared.dk[0]),
                          kSumBytes);
        ptx::bulk_add_f32(a.dv_sums + tile * kSumFloats, ptx::shared_address(shared.dv[0]),
                          kSumBytes);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        arrive_at(shared.sums_empty);
      }
    }
    __syncwarp();
  }
  ptx::bulk_wait<0>();
}

}  // namespace flashsci::sm90::triangle_bwd
