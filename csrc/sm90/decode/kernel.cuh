// Forward attention for few queries and many keys (decoding), Hopper.
//
// Maths     That of fwd/kernel.cuh. All queries of all heads that share a head of K and V (at most
//           64 rows) are one tile, so that K and V are read once. The keys are split among CTAs,
//           and a second kernel combines their partial results: o = sum_i w_i o_i / sum_i w_i, w_i
//           = 2^(lse_i - max lse).
// Roles     The blocks of keys of all (batch, head of K) in a row are cut into equal runs, one for
//           each CTA, for any lengths: a CTA works on the end of one sequence and the beginning of
//           the next. Warps 0 - 3 compute (one warpgroup, 64 rows), warp 4 loads.
// Shared    Q [64 columns][64 rows], a ring of K and V [stage][64 columns][kBlockK rows] in
//           128-byte swizzled boxes: `DecodeStorage`.
// Pipeline  The ring runs ahead by kStages blocks of K and V, also across sequences; by fewer if a
//           CTA has one sequence.
// Limits    Memory: docs/develop/kernels/sm90_decode.md. The tensor cores also multiply padding
//           rows, for which they have time.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../ptx/fence.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../../ptx/wgmma.cuh"
#include "../fwd/softmax.cuh"
#include "config.cuh"

namespace flashsci::sm90::decode {

using namespace fwd;  // softmax and masks are the forward's

template <class C>
__device__ __forceinline__ void decode_load(DecodeStorage<C>& shared, const DecodeArgs& a,
                                            int begin, int end, uint32_t stages) {
  DecodeTurn turn;
  for (int at = begin; at < end; ++at, turn.next(stages)) {
    const int sequence = at / a.plan.blocks;
    const int row = (a.plan.first_block + at - sequence * a.plan.blocks) * C::kBlockK;
    const int batch = sequence / a.p.heads_k, head = sequence - batch * a.p.heads_k;
    const int batch0 = batch / static_cast<int>(a.p.batch1);
    const int batch1 = batch - batch0 * static_cast<int>(a.p.batch1);
    const uint32_t stage = turn.stage;
    const auto load = [&](uint64_t& empty, uint64_t& full, unsigned char* target,
                          const CUtensorMap& map) {
      ptx::mbarrier_sleep(ptx::shared_address(&empty), turn.parity ^ 1);
      poison_stage(ptx::shared_address(target), C::kKVBytes);
      ptx::mbarrier_arrive_expect(ptx::shared_address(&full), sizeof(shared.k[0]));
#pragma unroll
      for (int block = 0; block < C::kColumnBlocks; ++block)
        ptx::tma_load_5d(ptx::shared_address(target + block * C::KVBox::kBytes), &map,
                         ptx::shared_address(&full), block * C::KVBox::kColumns, row, head, batch1,
                         batch0);
    };
    load(shared.k_empty[stage], shared.k_full[stage], shared.k[stage], a.k);
    load(shared.v_empty[stage], shared.v_full[stage], shared.v[stage], a.v);
  }
}

// Copies Q of a sequence into shared memory, with zeros in padding.
template <class C>
__device__ __forceinline__ void decode_load_q(DecodeStorage<C>& shared, const DecodeArgs& a,
                                              int sequence) {
  constexpr int kChunks = C::kHeadDim / 8;  // of 16 bytes in a row
#pragma unroll 1
  for (int i = threadIdx.x; i < kDecodeRows * kChunks; i += 128) {
    const int row = i / kChunks, chunk = i % kChunks;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (row < a.plan.rows && chunk * 8 < a.p.head_dim)
      words = __ldg(reinterpret_cast<const uint4*>(
          static_cast<const uint16_t*>(a.p.q) + DecodeRow(a, sequence, row).offset(a.p.q_strides) +
          chunk * 8));
    ptx::st_shared(ptx::shared_address(shared.q) + chunk / 8 * (kDecodeRows * 128) + row * 128 +
                       ((chunk ^ row) & 7) * 16,
                   words);
  }
}

template <class C>
__device__ __forceinline__ void start_rows(RowStatistics& rows, float (&o)[C::kHeadDim / 2]) {
  rows.row_max_log2[0] = rows.row_max_log2[1] = kUninitializedMax;
  rows.sum[0] = rows.sum[1] = 0.f;
#pragma unroll
  for (int e = 0; e < C::kHeadDim / 2; ++e) o[e] = 0.f;
}

template <class Mma, class C>
__device__ __forceinline__ void multiply_qk(float (&s)[C::kBlockK / 2], uint64_t q_desc,
                                            uint64_t k_desc, uint32_t stage) {
  ptx::wgmma_fence();
  const uint64_t k_tile = k_desc + stage * (C::kKVBytes / 16);
#pragma unroll
  for (int d = 0; d < C::kHeadDim / 16; ++d)
    Mma::template ss<0>(s, q_desc + (d / 4 * kDecodeRows * 128 + d % 4 * 32) / 16,
                        k_tile + (d / 4 * C::kBlockK * 128 + d % 4 * 32) / 16, d > 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_tie(s);
}

template <class Mma, class C>
__device__ __forceinline__ void multiply_pv(float (&o)[C::kHeadDim / 2],
                                            uint32_t (&p)[C::kBlockK / 16][4], uint64_t v_desc,
                                            uint32_t stage) {
  ptx::wgmma_fence();
  const uint64_t v_tile = v_desc + stage * (C::kKVBytes / 16);
#pragma unroll
  for (int n = 0; n < C::kBlockK / 16; ++n) Mma::template rs<1>(o, p[n], v_tile + n * 128, 1);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_tie(o);
}

template <class Op, class C>
__device__ __forceinline__ void decode_store(const float (&o)[C::kHeadDim / 2],
                                             const RowStatistics& rows, const DecodeArgs& a,
                                             const DecodeSegment& segment, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + 8 * half;
    const float sum = quad_sum(rows.sum[half]);
    const float inverse = sum == 0.f ? 0.f : ptx::rcp_approx(sum);
    const float lse = sum == 0.f ? -INFINITY : rows.row_max_log2[half] + ptx::lg2_approx(sum);
    if (r >= a.plan.rows) continue;
    if (segment.alone) {
      const DecodeRow place(a, segment.sequence, r);
      auto* out = static_cast<uint16_t*>(a.p.out) + place.offset(a.p.out_strides) + lane % 4 * 2;
#pragma unroll
      for (int e = half * 2; e < C::kHeadDim / 2; e += 4)
        if (e / 4 * 8 + lane % 4 * 2 < a.p.head_dim_v)
          *reinterpret_cast<uint32_t*>(out + e / 4 * 8) =
              Op::pack2(o[e] * inverse, o[e + 1] * inverse);
      if (lane % 4 == 0) a.p.lse[place.lse_offset(a.p)] = lse * kLn2;
    } else {
      const int64_t place =
          (int64_t{segment.sequence} * a.plan.segments + segment.index) * a.plan.rows + r;
      float* out = a.plan.partial_out + place * C::kHeadDim + lane % 4 * 2;
#pragma unroll
      for (int e = half * 2; e < C::kHeadDim / 2; e += 4)
        *reinterpret_cast<float2*>(out + e / 4 * 8) =
            make_float2(o[e] * inverse, o[e + 1] * inverse);
      if (lane % 4 == 0) a.plan.partial_lse[place] = lse;
    }
  }
}

template <class Op, class C>
__device__ __forceinline__ void decode_compute(DecodeStorage<C>& shared, const DecodeArgs& a,
                                               int begin, int end, uint32_t stages) {
  using MmaQK = typename Op::template Wgmma<C::kBlockK>;
  using MmaPV = typename Op::template Wgmma<C::kHeadDim>;
  constexpr int kBlockK = C::kBlockK, kHeadDim = C::kHeadDim;
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 * 16 + lane / 4;                       // this lane's first row
  const bool busy = ptx::redux_max(threadIdx.x / 32 * 16) < a.plan.rows;  // the warp has rows
  const Window window = window_of(a.p, a.p.seq_q, a.p.seq_k);
  // All queries see the keys [full_begin, full_end).
  const int full_begin = window.begin(a.p.seq_q - 1), full_end = max(window.end(0), 0);
  const int query[2] = {min(row, a.plan.rows - 1) / a.plan.group,
                        min(row + 8, a.plan.rows - 1) / a.plan.group};
  const uint64_t q_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.q), 16, 1024);
  const uint64_t k_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.k), 16, 1024);
  const uint64_t v_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.v), kBlockK * 128, 1024);
  const auto wait = [&](uint64_t& barrier, uint32_t parity) {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), parity);
  };
  const auto release = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  };

  float s[kBlockK / 2], o[kHeadDim / 2];
  uint32_t p[kBlockK / 16][4];
  RowStatistics rows;
  DecodeTurn turn;
  for (int at = begin; at < end;) {
    const DecodeSegment segment = decode_segment(a.plan, at, end);
    decode_load_q(shared, a, segment.sequence);
    ptx::fence_proxy_async();
    ptx::barrier_sync(1, 128);
    start_rows<C>(rows, o);
#pragma unroll 1
    for (int block = segment.first; block < segment.end; ++block, turn.next(stages), ++at) {
      const uint32_t stage = turn.stage;
      wait(shared.k_full[stage], turn.parity);
      multiply_qk<MmaQK, C>(s, q_desc, k_desc, stage);
      release(shared.k_empty[stage]);
      if (busy) {
        if (a.scores.mode != kScaled) scale_scores(s, a.scores);
        const int first_key = (a.plan.first_block + block) * kBlockK;
        if (first_key + kBlockK > full_end || first_key < full_begin) {
#pragma unroll
          for (int e = 0; e < kBlockK / 2; ++e) {
            const int i = query[e >> 1 & 1], j = first_key + e / 4 * 8 + lane % 4 * 2 + (e & 1);
            if (j < window.begin(i) || j >= window.end(i)) s[e] = -INFINITY;
          }
        }
        float alpha[2] = {1.f, 1.f};
        if (softmax_next(s, rows, alpha, a.scores.exp_scale)) {
#pragma unroll
          for (int e = 0; e < kHeadDim / 2; ++e) o[e] *= alpha[e >> 1 & 1];
        }
      }
#pragma unroll
      for (int e = 0; e < kBlockK / 2; e += 2)
        p[e / 8][e / 2 % 4] = busy ? Op::pack2(s[e], s[e + 1]) : 0u;
      wait(shared.v_full[stage], turn.parity);
      multiply_pv<MmaPV, C>(o, p, v_desc, stage);
      release(shared.v_empty[stage]);
    }
    decode_store<Op, C>(o, rows, a, segment, row);
    ptx::barrier_sync(1, 128);  // all warps have read the old Q
  }
}

template <class Op, class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<DecodeStorage<C>*>(
      shared_memory + (-ptx::shared_address(shared_memory) & 1023u));
  poison_block(&shared, sizeof(shared));
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&a.k);
    ptx::prefetch_tensor_map(&a.v);
    for (int stage = 0; stage < C::kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.k_full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.v_full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.k_empty[stage]), 4);
      ptx::mbarrier_init(ptx::shared_address(&shared.v_empty[stage]), 4);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::wait_for_prerequisites();  // the previous kernel in the stream
  ptx::launch_dependents();
  const int begin = blockIdx.x * a.plan.run;
  const int end = min(begin + a.plan.run, a.plan.sequences * a.plan.blocks);
  const uint32_t stages = a.plan.one_sequence ? C::kFewStages : C::kStages;
  if (__shfl_sync(0xffffffffu, threadIdx.x / 32, 0) == 4) {
    if (ptx::elect()) decode_load<C>(shared, a, begin, end, stages);
  } else {
    decode_compute<Op, C>(shared, a, begin, end, stages);
  }
}

}  // namespace flashsci::sm90::decode
