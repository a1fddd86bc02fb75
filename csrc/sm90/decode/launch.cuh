// The host side of decoding: the split of the keys among CTAs, workspace, launches.
#pragma once
#include <cuda_runtime.h>
#include <algorithm>
#include <cstdint>

#include "../../core/launch.cuh"
#include "../fwd/config.cuh"
#include "../launch_dependent.cuh"
#include "../tma_map.h"
#include "combine.cuh"
#include "config.cuh"
#include "kernel.cuh"

namespace flashsci::sm90::decode {

inline int decode_block(const FlashsciForwardParams& p) {
  return p.head_dim > 128 || p.head_dim_v > 128 ? 64 : 128;
}

// The cost for a CTA to go from one sequence to the next, and for another kernel to combine partial
// results, in blocks.
inline constexpr int kSwitchBlocks = 4;

// Blocks of a CTA, at least `least`, with `blocks` per sequence. Runs that end where sequences end
// are preferred if that pays. Runs within one sequence, whole or a part, pay more.
inline int whole_run(int least, int blocks) {
  if (least > blocks) {
    const int whole = (least + blocks - 1) / blocks * blocks;
    return whole - least <= std::min(least / 16, kSwitchBlocks) ? whole : least;
  }
  const int most = least + least / 16;
  for (int parts = blocks / least; parts > 0 && blocks <= parts * most; --parts)
    if (blocks % parts == 0) return blocks / parts;
  return least;
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
  const int processors = processors_of(p.device);
  if (processors <= 0) return plan;
  plan.run = whole_run(static_cast<int>((total + processors - 1) / processors), plan.blocks);
  plan.one_sequence = plan.blocks % plan.run == 0;
  plan.segments = plan.run % plan.blocks == 0 ? 1 : (plan.blocks + plan.run - 2) / plan.run + 1;
  return plan;
}

// Whether there are few queries, and enough keys for each CTA to have a run.
inline bool is_decoding(const FlashsciForwardParams& p) {
  return p.cu_seqlens_q == nullptr && p.bias_mask.bias == nullptr && p.bias_mask.mask == nullptr &&
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
cudaError_t launch_decode(const fwd::ForwardArgs& from, cudaStream_t stream) {
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
  a.scores = from.scores;
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
  error = allow_shared<kernel>(kSharedBytes, p.device);
  if (error != cudaSuccess) return error;
  const int total = a.plan.sequences * a.plan.blocks;
  error = launch_dependent<kernel>((total + a.plan.run - 1) / a.plan.run, C::kThreads, kSharedBytes,
                                   stream, a);
  if (error != cudaSuccess || a.plan.segments == 1) return error;
  const int64_t rows = int64_t{a.plan.sequences} * a.plan.rows;
  return launch_dependent<decode_combine<Op, kHeadDim>>((rows + 3) / 4, 128, 0, stream, a);
}

}  // namespace flashsci::sm90::decode
