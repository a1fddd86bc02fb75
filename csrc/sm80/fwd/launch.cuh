// The host side of the sm80 forward: the tile shape, the number of stages, and the launch.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../core/launch.cuh"
#include "kernel.cuh"

namespace flashsci::sm80::fwd {

inline ForwardPlan plan_of(const FlashsciForwardParams& p, int64_t tiles, float folds_above = 0.f) {
  ForwardPlan plan;
  plan.tiles = static_cast<uint32_t>(tiles);
  plan.scores = plan_scores_of(p, p.scale > folds_above);
  plan.lse_scale = lse_scale_of(plan.scores, p.scale);
  const auto aligned = [](int64_t stride) { return stride % kChunkElements == 0; };
  plan.vector_out = p.head_dim_v % kChunkElements == 0 && aligned(p.out_strides.batch0) &&
                    aligned(p.out_strides.batch1) && aligned(p.out_strides.head) &&
                    aligned(p.out_strides.row) && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  return plan;
}

template <class Op, class C, bool kVector, bool kAlibi, class... Drop>
cudaError_t launch_tiling(const FlashsciForwardParams& p, cudaStream_t stream,
                          const Drop&... dropout) {
  static_assert(
      sizeof(SharedStorage<C>) == (C::kBlockQ + 2 * C::kStages * C::kBlockK) * C::kHeadDim * 2,
      "the plan has no padding");
  static_assert(sizeof(SharedStorage<C>) <= kSharedBudget, "over the budget of the tile preset");
  const int64_t tiles = num_tiles(p.seq_q, C::kBlockQ, p.num_seqs, p.cu_seqlens_q != nullptr);
  const int64_t blocks = tiles * p.heads_q * p.batch0 * p.batch1;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX || p.batch0 * p.batch1 > INT32_MAX) return cudaErrorInvalidValue;
  // A slope is divided by the scale, unless that is too small.
  return launch<forward_kernel<Op, C, kVector, kAlibi, Drop...>>(
      blocks, C::kThreads, sizeof(SharedStorage<C>), p.device, stream, p,
      plan_of(p, tiles, kAlibi ? 1e-4f : 0.f), dropout...);
}

// Two stages if two such CTAs fit an SM, and registers allow (D <= 128, no ALiBi); otherwise one.
template <class Op, class C, bool kAlibi = false>
cudaError_t launch_padded(const FlashsciForwardParams& p, cudaStream_t stream) {
  const bool vector =
      p.copy_bytes >= 16 && p.head_dim % kChunkElements == 0 && p.head_dim_v % kChunkElements == 0;
  // Distances need registers: half the keys.
  constexpr bool kFar = kAlibi && (C::kHeadDim == 64 || C::kHeadDim == 128);
  using Narrow = Tiling<C::kHeadDim, C::kBlockQ, C::kBlockK / 2, C::kWarps, 1, C::kMinBlocks>;
  using Aligned = std::conditional_t<kFar, Narrow, C>;
  using Unaligned = std::conditional_t<kFar, Narrow, typename C::Unaligned>;
  if (!vector) return launch_tiling<Op, Unaligned, false, kAlibi>(p, stream);
  if constexpr (C::kHeadDim <= 128 && !kAlibi) {
    using Small = SmallTiles<C::kHeadDim>;
    const int longest = p.cu_seqlens_q != nullptr ? p.max_seqlen_q : p.seq_q;
    if (longest >= 0 && longest <= Small::kBlockQ)
      return launch_tiling<Op, Small, true, false>(p, stream);
  }
  using TwoStages = typename C::TwoStages;
  if constexpr (C::kHeadDim <= 128 && !kAlibi &&
                sizeof(SharedStorage<TwoStages>) <= kSharedBudget) {
    constexpr int kReserved = 1024;  // per CTA, by the system
    if (C::kMinBlocks * (sizeof(SharedStorage<TwoStages>) + kReserved) <=
        static_cast<size_t>(p.shared_per_sm))
      return launch_tiling<Op, TwoStages, true, false>(p, stream);
  }
  return launch_tiling<Op, Aligned, true, kAlibi>(p, stream);
}

// Picks the smallest padded head dimension that holds D and Dv. kAlibi: the bias is slopes.
template <class Op, bool kAlibi = false>
cudaError_t launch_forward(const FlashsciForwardParams& p, cudaStream_t stream) {
  if ((p.bias_mask.bias != nullptr) != kAlibi || p.bias_mask.mask != nullptr)
    return cudaErrorNotSupported;
  const int dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  if (dim <= 32) return launch_padded<Op, Tiles<32>, kAlibi>(p, stream);
  if (dim <= 64) return launch_padded<Op, Tiles<64>, kAlibi>(p, stream);
  if (dim <= 96) return launch_padded<Op, Tiles<96>, kAlibi>(p, stream);
  if (dim <= 128) return launch_padded<Op, Tiles<128>, kAlibi>(p, stream);
  if (dim <= 192) return launch_padded<Op, Tiles<192>, kAlibi>(p, stream);
  if (dim <= 256) return launch_padded<Op, Tiles<256>, kAlibi>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace flashsci::sm80::fwd
