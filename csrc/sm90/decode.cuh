// Forward attention for few queries and many keys (decoding), Hopper.
//
// Maths     That of forward.cuh. All queries of all heads that share a head of K and V (at most 64
//           rows) are one tile, so that K and V are read once; the keys are split among CTAs, whose
//           partial results a second kernel combines: o = sum_i w_i o_i / sum_i w_i,
//           w_i = 2^(lse_i - max lse).
// Roles     The blocks of keys of all (batch, head of K) in a row are cut into equal runs, one for
//           each CTA, whatever the lengths: a CTA works on the end of one sequence and the
//           beginning of the next. Warps 0 - 3 compute (one warpgroup, 64 rows), warp 4 loads.
// Shared    Q [64 columns][64 rows], a ring of K and V [stage][64 columns][kBlockK rows] in
//           128-byte swizzled boxes: `DecodeStorage`.
// Pipeline  The ring runs ahead by kStages blocks of K and V, across sequences too.
// Limits    Memory: docs/kernels/sm90_forward.md. The tensor cores multiply rows that do not exist;
//           they have the time.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "../common/poison.cuh"
#include "../common/ptx/cp_async.cuh"
#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/redux.cuh"
#include "../common/ptx/shared.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "../common/ptx/wgmma.cuh"
#include "launch.h"
#include "layout.cuh"
#include "softmax.cuh"

namespace flashsci::sm90 {

inline constexpr int kDecodeRows = 64;

template <int kHeadDim_>
struct DecodeTiling {
  static constexpr int kHeadDim = kHeadDim_, kColumnBlocks = kHeadDim / 64;
  static constexpr int kBlockK = kHeadDim == 256 ? 64 : 128;
  static constexpr int kStages = kHeadDim == 64 ? 4 : 3;
  static constexpr int kThreads = 160;
  static constexpr int kQBytes = kDecodeRows * kHeadDim * 2;
  static constexpr int kKVBytes = kBlockK * kHeadDim * 2;
  using KVBox = Box<kBlockK>;
  static_assert(kKVBytes == kColumnBlocks * KVBox::kBytes, "a barrier expects what is loaded");
};

template <class C>
struct DecodeStorage {
  unsigned char q[C::kQBytes];
  unsigned char k[C::kStages][C::kKVBytes];
  unsigned char v[C::kStages][C::kKVBytes];
  uint64_t k_full[C::kStages], k_empty[C::kStages];
  uint64_t v_full[C::kStages], v_empty[C::kStages];
};

// How the work is cut. All sequences have the same blocks.
struct DecodePlan {
  int sequences;            // B0 * B1 * Hk
  int group, rows;          // heads of Q for one of K; rows = group * seq_q
  int first_block, blocks;  // of every sequence
  int run;                  // blocks of a CTA
  int segments;             // at most, of a sequence
  float* partial_out;       // [sequence][segment][row][kHeadDim], normalised
  float* partial_lse;       // [sequence][segment][row], log2
};

struct alignas(128) DecodeArgs {
  CUtensorMap k, v;
  FlashsciForwardParams p;
  DecodePlan plan;
  int score_mode;
  float score_inner, score_outer;  // ForwardArgs
  float exp_scale;
};

// What a CTA does of one sequence.
struct DecodeSegment {
  int sequence, first, end;  // blocks
  int index;                 // among the segments of the sequence
  bool alone;
};

__device__ __forceinline__ DecodeSegment decode_segment(const DecodePlan& plan, int at, int end) {
  DecodeSegment s;
  s.sequence = at / plan.blocks;
  const int begin = s.sequence * plan.blocks;
  s.first = at - begin;
  s.end = min(end - begin, plan.blocks);
  s.index = at / plan.run - begin / plan.run;
  s.alone = s.first == 0 && s.end == plan.blocks;
  return s;
}

// Row r of a tile is query r / group of head r % group of the heads that share K and V.
struct DecodeRow {
  int batch0, batch1, head, query;
  __device__ __forceinline__ DecodeRow(const DecodeArgs& a, int sequence, int row) {
    const int heads_k = a.p.heads_k, batch = sequence / heads_k;
    batch0 = batch / static_cast<int>(a.p.batch1);
    batch1 = batch - batch0 * static_cast<int>(a.p.batch1);
    query = row / a.plan.group;
    head = (sequence - batch * heads_k) * a.plan.group + row - query * a.plan.group;
  }
  __device__ __forceinline__ int64_t offset(const FlashsciStrides& s) const {
    return batch0 * s.batch0 + batch1 * s.batch1 + head * s.head + query * s.row;
  }
  __device__ __forceinline__ int64_t lse_offset(const FlashsciForwardParams& p) const {
    return ((batch0 * p.batch1 + batch1) * p.heads_q + head) * p.seq_q + query;
  }
};

template <class C>
__device__ __forceinline__ void decode_load(DecodeStorage<C>& shared, const DecodeArgs& a,
                                            int begin, int end) {
  uint32_t turn = 0;
  for (int at = begin; at < end; ++at, ++turn) {
    const int sequence = at / a.plan.blocks;
    const int row = (a.plan.first_block + at - sequence * a.plan.blocks) * C::kBlockK;
    const int batch = sequence / a.p.heads_k, head = sequence - batch * a.p.heads_k;
    const int batch0 = batch / static_cast<int>(a.p.batch1);
    const int batch1 = batch - batch0 * static_cast<int>(a.p.batch1);
    const uint32_t stage = turn % C::kStages, parity = (turn / C::kStages & 1) ^ 1;
    const auto load = [&](uint64_t& empty, uint64_t& full, unsigned char* target,
                          const CUtensorMap& map) {
      ptx::mbarrier_sleep(ptx::shared_address(&empty), parity);
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

// Q of a sequence into shared memory, zeros where there is none.
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

template <class Op, class C>
__device__ __forceinline__ void decode_compute(DecodeStorage<C>& shared, const DecodeArgs& a,
                                               int begin, int end) {
  using MmaQK = typename Op::template Wgmma<C::kBlockK>;
  using MmaPV = typename Op::template Wgmma<C::kHeadDim>;
  constexpr int kBlockK = C::kBlockK, kStages = C::kStages, kHeadDim = C::kHeadDim;
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 * 16 + lane / 4;                       // this lane's first
  const bool busy = ptx::redux_max(threadIdx.x / 32 * 16) < a.plan.rows;  // the warp
  const Window window = window_of(a.p, a.p.seq_q, a.p.seq_k);
  // All queries see the keys [full_begin, full_end).
  const int full_begin = window.begin(a.p.seq_q - 1), full_end = max(window.end(0), 0);
  const int query[2] = {min(row, a.plan.rows - 1) / a.plan.group,
                        min(row + 8, a.plan.rows - 1) / a.plan.group};
  const uint64_t q_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.q), 16, 1024);
  const uint64_t k_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.k), 16, 1024);
  const uint64_t v_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.v), kBlockK * 128, 1024);
  const auto wait = [&](uint64_t& barrier, uint32_t parity) {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), parity & 1);
  };
  const auto release = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  };

  float s[kBlockK / 2], o[kHeadDim / 2];
  uint32_t p[kBlockK / 16][4];
  uint32_t turn = 0;
  for (int at = begin; at < end;) {
    const DecodeSegment segment = decode_segment(a.plan, at, end);
    decode_load_q(shared, a, segment.sequence);
    ptx::fence_proxy_async();
    ptx::barrier_sync(1, 128);
    RowStatistics rows;
    rows.offset[0] = rows.offset[1] = kNoKey;
    rows.sum[0] = rows.sum[1] = 0.f;
#pragma unroll
    for (int e = 0; e < kHeadDim / 2; ++e) o[e] = 0.f;
#pragma unroll 1
    for (int block = segment.first; block < segment.end; ++block, ++turn, ++at) {
      const uint32_t stage = turn % kStages;
      wait(shared.k_full[stage], turn / kStages);
      ptx::wgmma_fence();
      const uint64_t k_tile = k_desc + stage * (C::kKVBytes / 16);
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d)
        MmaQK::template ss<0>(s, q_desc + (d / 4 * kDecodeRows * 128 + d % 4 * 32) / 16,
                              k_tile + (d / 4 * kBlockK * 128 + d % 4 * 32) / 16, d > 0);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(s);
      release(shared.k_empty[stage]);
      if (busy) {
        if (a.score_mode != kScaled) scale_scores(s, a);
        const int first_key = (a.plan.first_block + block) * kBlockK;
        if (first_key + kBlockK > full_end || first_key < full_begin) {
#pragma unroll
          for (int e = 0; e < kBlockK / 2; ++e) {
            const int i = query[e >> 1 & 1], j = first_key + e / 4 * 8 + lane % 4 * 2 + (e & 1);
            if (j < window.begin(i) || j >= window.end(i)) s[e] = -INFINITY;
          }
        }
        float alpha[2] = {1.f, 1.f};
        if (softmax_next(s, rows, alpha, a.exp_scale)) {
#pragma unroll
          for (int e = 0; e < kHeadDim / 2; ++e) o[e] *= alpha[e >> 1 & 1];
        }
      }
#pragma unroll
      for (int e = 0; e < kBlockK / 2; e += 2)
        p[e / 8][e / 2 % 4] = busy ? Op::pack2(s[e], s[e + 1]) : 0u;
      wait(shared.v_full[stage], turn / kStages);
      ptx::wgmma_fence();
      const uint64_t v_tile = v_desc + stage * (C::kKVBytes / 16);
#pragma unroll
      for (int n = 0; n < kBlockK / 16; ++n) MmaPV::template rs<1>(o, p[n], v_tile + n * 128, 1);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(o);
      release(shared.v_empty[stage]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 8 * half;
      const float sum = quad_sum(rows.sum[half]);
      const float inverse = sum == 0.f ? 0.f : ptx::rcp_approx(sum);
      const float lse = sum == 0.f ? -INFINITY : rows.offset[half] + ptx::lg2_approx(sum);
      if (r >= a.plan.rows) continue;
      if (segment.alone) {
        const DecodeRow place(a, segment.sequence, r);
        auto* out = static_cast<uint16_t*>(a.p.out) + place.offset(a.p.out_strides) + lane % 4 * 2;
#pragma unroll
        for (int e = half * 2; e < kHeadDim / 2; e += 4)
          if (e / 4 * 8 + lane % 4 * 2 < a.p.head_dim_v)
            *reinterpret_cast<uint32_t*>(out + e / 4 * 8) =
                Op::pack2(o[e] * inverse, o[e + 1] * inverse);
        if (lane % 4 == 0) a.p.lse[place.lse_offset(a.p)] = lse * kLn2;
      } else {
        const int64_t place =
            (int64_t{segment.sequence} * a.plan.segments + segment.index) * a.plan.rows + r;
        float* out = a.plan.partial_out + place * kHeadDim + lane % 4 * 2;
#pragma unroll
        for (int e = half * 2; e < kHeadDim / 2; e += 4)
          *reinterpret_cast<float2*>(out + e / 4 * 8) =
              make_float2(o[e] * inverse, o[e + 1] * inverse);
        if (lane % 4 == 0) a.plan.partial_lse[place] = lse;
      }
    }
    ptx::barrier_sync(1, 128);  // nobody reads the old Q any more
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
  ptx::launch_dependents();
  const int begin = blockIdx.x * a.plan.run;
  const int end = min(begin + a.plan.run, a.plan.sequences * a.plan.blocks);
  if (__shfl_sync(0xffffffffu, threadIdx.x / 32, 0) == 4) {
    if (ptx::elect()) decode_load<C>(shared, a, begin, end);
  } else {
    decode_compute<Op, C>(shared, a, begin, end);
  }
}

// One warp for each row of each sequence that has several segments.
template <class Op, int kHeadDim>
__global__ void __launch_bounds__(128, 8) decode_combine(const __grid_constant__ DecodeArgs a) {
  ptx::wait_for_prerequisites();
  const DecodePlan& plan = a.plan;
  const int index = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int sequence = index / plan.rows, row = index - sequence * plan.rows;
  if (sequence >= plan.sequences) return;
  const int begin = sequence * plan.blocks, last = begin + plan.blocks - 1;
  const int segments = last / plan.run - begin / plan.run + 1;
  if (segments == 1) return;
  const int64_t first = int64_t{sequence} * plan.segments * plan.rows + row;
  float maximum = -INFINITY;
  for (int i = 0; i < segments; ++i)
    maximum = fmaxf(maximum, plan.partial_lse[first + i * plan.rows]);
  const float reference = maximum == -INFINITY ? 0.f : maximum;
  constexpr int kPairs = kHeadDim / 64;  // of columns, of a lane
  float2 sum[kPairs] = {};
  float weights = 0.f;
  for (int i = 0; i < segments; ++i) {
    const int64_t at = first + i * plan.rows;
    const float weight = ptx::ex2_approx(plan.partial_lse[at] - reference);
    weights += weight;
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const float2 part =
          *reinterpret_cast<const float2*>(plan.partial_out + at * kHeadDim + n * 64 + lane * 2);
      sum[n].x = fmaf(weight, part.x, sum[n].x);
      sum[n].y = fmaf(weight, part.y, sum[n].y);
    }
  }
  const float inverse = weights == 0.f ? 0.f : 1.f / weights;
  const DecodeRow place(a, sequence, row);
  auto* out = static_cast<uint16_t*>(a.p.out) + place.offset(a.p.out_strides);
#pragma unroll
  for (int n = 0; n < kPairs; ++n)
    if (n * 64 + lane * 2 < a.p.head_dim_v)
      *reinterpret_cast<uint32_t*>(out + n * 64 + lane * 2) =
          Op::pack2(sum[n].x * inverse, sum[n].y * inverse);
  if (lane == 0)
    a.p.lse[place.lse_offset(a.p)] =
        weights == 0.f ? -INFINITY : (reference + ptx::lg2_approx(weights)) * kLn2;
}

inline int decode_block(const FlashsciForwardParams& p) {
  return p.head_dim > 128 || p.head_dim_v > 128 ? 64 : 128;
}

inline DecodePlan decode_plan(const FlashsciForwardParams& p) {
  DecodePlan plan{};
  plan.group = p.heads_q / p.heads_k;
  plan.rows = plan.group * p.seq_q;
  // Blocks that some query sees.
  const int64_t shift = p.lower_right ? int64_t{p.seq_k} - p.seq_q : 0;
  const int64_t left = p.window_left < 0 ? 0 : shift - p.window_left;
  const int64_t right = p.window_right < 0 ? p.seq_k : p.seq_q + shift + p.window_right;
  const int64_t begin = left > 0 ? left : 0, end = right < p.seq_k ? right : p.seq_k;
  const int block = decode_block(p);
  plan.first_block = static_cast<int>(begin / block);
  plan.blocks = begin < end ? static_cast<int>((end + block - 1) / block) - plan.first_block : 0;
  const int64_t sequences = p.batch0 * p.batch1 * p.heads_k;
  const int64_t total = sequences * plan.blocks;
  if (total == 0 || total > INT32_MAX / 2) return plan;
  plan.sequences = static_cast<int>(sequences);
  const int processors = multiprocessors(p.device);
  plan.run = processors > 0 ? static_cast<int>((total + processors - 1) / processors) : 0;
  if (plan.run > 0)
    plan.segments = plan.run % plan.blocks == 0 ? 1 : (plan.blocks + plan.run - 2) / plan.run + 1;
  return plan;
}

// Few queries, and keys enough for a CTA to have a run of them.
inline bool is_decoding(const FlashsciForwardParams& p) {
  return p.cu_seqlens_q == nullptr && p.pairs.bias == nullptr && p.pairs.mask == nullptr &&
         int64_t{p.seq_q} * (p.heads_q / p.heads_k) <= kDecodeRows && p.seq_q > 0 &&
         decode_plan(p).blocks > 1 && decode_plan(p).run > 0;
}

inline int64_t decode_workspace(const FlashsciForwardParams& p) {
  const DecodePlan plan = decode_plan(p);
  const int dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  const int64_t padded = dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
  return int64_t{plan.sequences} * plan.segments * plan.rows * (padded + 1) * 4;
}

template <class Op, int kHeadDim>
cudaError_t launch_decode(const ForwardArgs& from, cudaStream_t stream) {
  using C = DecodeTiling<kHeadDim>;
  constexpr int kSharedBytes = sizeof(DecodeStorage<C>) + 1024;
  static_assert(kSharedBytes <= 227 * 1024, "the shared memory of an SM");
  const FlashsciForwardParams& p = from.p;
  const auto aligned = [](int64_t size, int64_t stride) { return size <= 1 || stride % 8 == 0; };
  if (reinterpret_cast<uintptr_t>(p.q) % 16 != 0 || !aligned(p.batch0, p.q_strides.batch0) ||
      !aligned(p.batch1, p.q_strides.batch1) || !aligned(p.heads_q, p.q_strides.head) ||
      !aligned(p.seq_q, p.q_strides.row) || p.head_dim % 8 != 0)
    return cudaErrorNotSupported;
  DecodeArgs a;
  a.p = p;
  a.score_mode = from.score_mode, a.score_inner = from.score_inner;
  a.score_outer = from.score_outer, a.exp_scale = from.exp_scale;
  a.plan = decode_plan(p);
  a.plan.partial_out = static_cast<float*>(p.workspace);
  a.plan.partial_lse =
      a.plan.partial_out + int64_t{a.plan.sequences} * a.plan.segments * a.plan.rows * kHeadDim;
  constexpr MapElement k16Bit = Op::kIsBf16 ? kBfloat16 : kFloat16;
  cudaError_t error = encode_map(&a.k, p.k, k16Bit, p.head_dim,
                                 dense_dims(p.k_strides, p.seq_k, p.heads_k, p.batch1, p.batch0),
                                 C::KVBox::kColumns, C::KVBox::kRows);
  if (error == cudaSuccess)
    error = encode_map(&a.v, p.v, k16Bit, p.head_dim_v,
                       dense_dims(p.v_strides, p.seq_k, p.heads_k, p.batch1, p.batch0),
                       C::KVBox::kColumns, C::KVBox::kRows);
  if (error != cudaSuccess) return error;
  constexpr auto kernel = decode_kernel<Op, C>;
  static std::atomic<uint64_t> configured{0};
  error = allow_shared(kernel, kSharedBytes, p.device, configured);
  if (error != cudaSuccess) return error;
  const int total = a.plan.sequences * a.plan.blocks;
  kernel<<<(total + a.plan.run - 1) / a.plan.run, C::kThreads, kSharedBytes, stream>>>(a);
  error = cudaGetLastError();
  if (error != cudaSuccess || a.plan.segments == 1) return error;
  // It starts beside the other and waits for its end: a launch less to wait for.
  const int64_t rows = int64_t{a.plan.sequences} * a.plan.rows;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>((rows + 3) / 4);
  config.blockDim = 128;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, decode_combine<Op, kHeadDim>, a);
}

}  // namespace flashsci::sm90
