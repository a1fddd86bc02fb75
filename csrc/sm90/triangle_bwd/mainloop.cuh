// A consumer warpgroup of the triangle backward: 64 keys and every other block of queries, member
// after member, from S^T to its part of dK and dV, to dQ and to the sums of dbias.
//
// `Consumer::member` is the work on a member; its steps are named by the products they issue. S^T
// of the next step is computed during dQ and dK of this one.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../core/smem_tile.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/fence.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../../ptx/wgmma.cuh"
#include "config.cuh"
#include "dbias.cuh"

namespace flashsci::sm90::triangle_bwd {

template <class Op, class C>
struct Consumer {
  using MmaS = typename Op::template Wgmma<kBlock>;
  using MmaSum = typename Op::template Wgmma<kHeadDim>;

  TriangleStorage<C>& shared;
  const TriangleArgs& a;
  const int w;
  float (&dbias)[C::kSteps][kBlock / 2];
  float dk[kHeadDim / 2], dv[kHeadDim / 2], dq[kHeadDim / 2];
  float prob[kBlock / 2], dp[kBlock / 2];          // S^T, P^T, dS^T in turn; dP^T
  uint32_t p[kBlock / 16][4], ds[kBlock / 16][4];  // P^T and dS^T as operands, per 16 queries
  uint32_t count = 0;                              // blocks done
  int some_hidden = 0;                             // whether some keys are hidden from the member

  __device__ __forceinline__ Consumer(TriangleStorage<C>& shared_, const TriangleArgs& a_, int w_,
                                      float (&dbias_)[C::kSteps][kBlock / 2])
      : shared(shared_), a(a_), w(w_), dbias(dbias_) {}

  __device__ __forceinline__ static uint32_t thread() { return threadIdx.x % 128u; }
  __device__ __forceinline__ static uint32_t address(const void* x) {
    return ptx::shared_address(x);
  }
  __device__ __forceinline__ static uint64_t tile(const void* x) {
    return ptx::wgmma_descriptor_span64(address(x));
  }
  // For the block after those done.
  __device__ __forceinline__ uint64_t q_tile(uint32_t ahead) const {
    return tile(shared.q[w]) + (count + ahead) % kStages * (RowBox::kBytes / 16);
  }
  __device__ __forceinline__ uint64_t dout_tile() const {
    return tile(shared.dout[w]) + count % kStages * (RowBox::kBytes / 16);
  }
  __device__ __forceinline__ uint32_t statistics() const {
    return address(&shared.statistics[w][0]) + count % kStages * sizeof(Statistics);
  }
  __device__ __forceinline__ void release(uint64_t& barrier) const {
    __syncwarp();
    if (thread() % 32 == 0) ptx::mbarrier_arrive(address(&barrier));
  }

  // x^T = (rows of K or V) (rows of Q or dO)^T
  __device__ __forceinline__ static void issue_product(float (&x)[kBlock / 2], uint64_t keys,
                                                       uint64_t queries) {
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d)
      MmaS::template ss<0>(x, keys + d * (32 / 16), queries + d * (32 / 16), d > 0);
    ptx::wgmma_commit();
  }
  // x += (P or dS)^T (dO or Q); for a member's first block x = that product.
  __device__ __forceinline__ static void issue_sum(float (&x)[kHeadDim / 2],
                                                   const uint32_t (&by)[kBlock / 16][4],
                                                   uint64_t queries, bool first, int begin,
                                                   int end) {
#pragma unroll
    for (int m = begin; m < end; ++m)
      MmaSum::template rs<1>(x, by[m], queries + m * (1024 / 16), !first || m > 0);
    ptx::wgmma_commit();
  }

  // S^T of the block `ahead` of this one.
  __device__ __forceinline__ void issue_scores(uint32_t slot, uint32_t ahead) {
    wait_for(shared.q_full[w][(count + ahead) % kStages], (count + ahead) / kStages);
    ptx::wgmma_fence();
    issue_product(prob, tile(shared.k[0]) + slot * (RowBox::kBytes / 16), q_tile(ahead));
  }

  // This lane's two keys, if the member does not see them, become 0.
  __device__ __forceinline__ void hide(uint32_t slot) {
    const uint32_t row = thread() / 32 * 16 + thread() % 32 / 4;
    const uint32_t keys = shared.member[slot].keys[row / 32] >> row % 32;
#pragma unroll
    for (int e = 0; e < kBlock / 2; ++e) prob[e] = keys >> (e / 2 % 2 * 8) & 1 ? prob[e] : 0.f;
  }

  // P becomes an operand in two parts, the second when dS of the first has freed registers.
  __device__ __forceinline__ void pack(int part) {
#pragma unroll
    for (int e = part * (kBlock / 4); e < (part + 1) * (kBlock / 4); e += 2)
      p[e / 8][e / 2 % 4] = Op::pack2(prob[e], prob[e + 1]);
  }

  // Issues dP^T; P^T is computed meanwhile; on return both are complete.
  __device__ __forceinline__ void exponentiate(uint32_t slot, int step) {
    ptx::wgmma_fence();
    issue_product(dp, tile(shared.v[0]) + slot * (RowBox::kBytes / 16), dout_tile());
    const uint32_t lse = statistics() + thread() % 4 * 8;
    const bool large =
        ptx::redux_max(static_cast<int>(ptx::ld_shared(statistics() + 2 * kBlock * 4))) != 0;
    ptx::wgmma_wait<1>();
    ptx::wgmma_tie(prob);
    const uint32_t bias = address(shared.bias[w][step][0][thread()]);
#pragma unroll
    for (int n = 0; n < kBlock / 8; ++n) {
      const float2 row = ptx::ld_shared_f2(lse + n * 32);
      const uint4 addend = ptx::ld_shared_v4(bias + n * (128 * 16));
      const uint32_t words[4] = {addend.x, addend.y, addend.z, addend.w};
#pragma unroll
      for (int e = 0; e < 4; ++e)
        prob[n * 4 + e] = ptx::ex2_approx(fmaf(
            prob[n * 4 + e], a.exp_scale, __uint_as_float(words[e]) - (e % 2 ? row.y : row.x)));
    }
    if (large || some_hidden != 0) {
      limit_probabilities(prob);
      hide(slot);
    }
    ptx::wgmma_tie(prob);
    pack(0);
    ptx::schedule_fence(prob[kBlock / 2 - 1]);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(dp);
  }

  // Issues dV; meanwhile makes dS^T, which dbias adds up.
  __device__ __forceinline__ void issue_dv(int step) {
    const uint32_t delta = statistics() + kBlock * 4 + thread() % 4 * 8;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      constexpr int kParts = kBlock / 32;  // of 16 queries
      if (part > 0) pack(part);
      ptx::wgmma_fence();
      issue_sum(dv, p, dout_tile(), step == 0, part * kParts, (part + 1) * kParts);
#pragma unroll
      for (int n = part * kParts * 2; n < (part + 1) * kParts * 2; ++n) {
        const float2 row = ptx::ld_shared_f2(delta + n * 32);
#pragma unroll
        for (int e = n * 4; e < n * 4 + 4; ++e) {
          prob[e] *= dp[e] + (e % 2 ? row.y : row.x);
          dbias[step][e] += prob[e];
        }
#pragma unroll
        for (int e = n * 4; e < n * 4 + 4; e += 2)
          ds[e / 8][e / 2 % 4] = Op::pack2(prob[e], prob[e + 1]);
      }
    }
  }

  // Stores dS, in rows of queries, for all warps of the consumer, with the barriers between writes
  // and reads.
  __device__ __forceinline__ void share_ds() {
    const uint32_t lane = thread() % 32, matrix_row = lane % 8;
    const uint32_t target = address(shared.ds[w]) + (matrix_row + lane / 16 * 8) * 128 +
                            ((thread() / 32 * 2 + lane / 8 % 2) ^ matrix_row) * 16;
    wait_for(shared.ds_empty[w], count + 1);
    poison_pieces(target, kBlock / 16, 2048);
#pragma unroll
    for (int m = 0; m < kBlock / 16; ++m) ptx::stmatrix_x4_trans(target + m * 2048, ds[m]);
    ptx::fence_proxy_async();
    ptx::barrier_sync(1 + w, 128);
  }

  __device__ __forceinline__ void issue_dq(uint32_t slot) {
    const uint64_t rows = ptx::wgmma_descriptor(address(shared.ds[w]), 16, 1024);
    const uint64_t keys = tile(shared.k[0]) + slot * (RowBox::kBytes / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kBlock / 16; ++n)
      MmaSum::template ss<1>(dq, rows + n * (32 / 16), keys + n * (1024 / 16), n > 0);
    ptx::wgmma_commit();
  }

  // In register order, 16 bytes a thread.
  __device__ __forceinline__ static void put(const float (&x)[kHeadDim / 2], uint32_t target) {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j)
      ptx::st_shared(target + j * 2048,
                     make_uint4(__float_as_uint(x[j * 4]), __float_as_uint(x[j * 4 + 1]),
                                __float_as_uint(x[j * 4 + 2]), __float_as_uint(x[j * 4 + 3])));
  }
  __device__ __forceinline__ void write_dq() {
    const uint32_t target = address(shared.dq[w]) + thread() * 16;
    wait_for(shared.dq_empty[w], count + 1);
    poison_pieces(target, kHeadDim / 8, 2048);
    put(dq, target);
    ptx::fence_proxy_async();
    release(shared.dq_full[w]);
  }

  // slot: that of K and V.
  __device__ __forceinline__ void member(uint32_t slot) {
    const Member& described = shared.member[slot];
    some_hidden = ptx::redux_max((described.keys[0] & described.keys[1]) != ~0u);
    issue_scores(slot, 0);
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      exponentiate(slot, step);
      issue_dv(step);
      share_ds();
      issue_dq(slot);
      ptx::wgmma_fence();
      issue_sum(dk, ds, q_tile(0), step == 0, 0, kBlock / 16);
      if (step + 1 < C::kSteps) {
        issue_scores(slot, 1);
        ptx::wgmma_wait<2>();
      } else {
        ptx::wgmma_wait<1>();
      }
      ptx::wgmma_tie(dq);
      ptx::wgmma_tie(dv);
      release(shared.ds_empty[w]);
      write_dq();
      if (step + 1 < C::kSteps)
        ptx::wgmma_wait<1>();
      else
        ptx::wgmma_wait<0>();
      ptx::wgmma_tie(dk);
      release(shared.q_empty[w][count % kStages]);
      ++count;
    }
    const uint32_t at = thread() * 16;
    wait_for(shared.sums_empty, count / C::kSteps);
    put(dk, address(shared.dk[w]) + at);
    put(dv, address(shared.dv[w]) + at);
    release(shared.sums_full);
  }
};

template <class Op, class C>
__device__ __forceinline__ void consume(TriangleStorage<C>& shared, const TriangleArgs& a, int w) {
  float dbias[C::kSteps][kBlock / 2];
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step)
#pragma unroll
    for (int e = 0; e < kBlock / 2; ++e) dbias[step][e] = 0.f;
  w = ptx::redux_max(w);
  uint32_t owner, end, i = 0, count = 0;
  {
    const Work work(a, blockIdx.x);
    owner = work.owner;
    end = min(work.count, a.members - work.member);
  }
#pragma unroll 1
  for (;;) {
    load_bias<Op, C>(shared, a, owner, w);
#pragma unroll 1
    for (; i < end; ++i) {
      // Equal in all lanes, which the compiler learns only from redux: wgmma needs uniform control
      // flow.
      const uint32_t slot = ptx::redux_max(i % 2);
      wait_for(shared.member_full[slot], i / 2);
      if (ptx::redux_max(shared.member[slot].hidden) == 0) {
        Consumer<Op, C> consumer(shared, a, w, dbias);
        consumer.count = count;
        consumer.member(slot);
        count = consumer.count;
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive_at(shared.member_empty[slot]);
    }
    store_dbias<C>(dbias, a, owner, w);
    const uint32_t left = Work(a, blockIdx.x).count - i;
    if (left == 0) break;
    end = i + min(left, a.members);
    ++owner;
  }
}

}  // namespace flashsci::sm90::triangle_bwd
