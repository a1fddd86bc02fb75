// The host side of the Turing forward: the tile shape, and the launch.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../core/launch.cuh"
#include "kernel.cuh"

namespace flashsci::sm75::fwd {

template <class Op, class C, bool kVector, bool kHasBiasMask>
cudaError_t launch_tiling(const FlashsciForwardParams& p, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(SharedStorage<C>);
  static_assert(kSharedBytes == 4 * C::kBlockK * C::kHeadDim * 2, "the plan has no padding");
  static_assert(kSharedBytes >= C::kBlockQ * C::kHeadDim * 2, "Q and the output pass through it");
  static_assert(C::kMinBlocks * kSharedBytes <= kSharedPerSM, "the CTAs of an SM of Turing");
  static_assert(C::kMinBlocks * C::kThreads <= 1024, "threads of an SM of Turing");
  ForwardPlan plan;
  const int64_t tiles = num_tiles(p.seq_q, C::kBlockQ, p.num_seqs, p.cu_seqlens_q != nullptr);
  const int64_t blocks = tiles * p.heads_q * p.batch0 * p.batch1;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX || p.batch0 * p.batch1 > INT32_MAX) return cudaErrorInvalidValue;
  plan.tiles = static_cast<uint32_t>(tiles);
  plan.scores = plan_scores(p.scale, p.softcap, p.scale > 0.f && p.bias_mask.bias == nullptr);
  plan.lse_scale = lse_scale_of(plan.scores, p.scale);
  const auto aligned = [](int64_t stride) { return stride % kChunkElements == 0; };
  plan.vector_out = p.head_dim_v % kChunkElements == 0 && aligned(p.out_strides.batch0) &&
                    aligned(p.out_strides.batch1) && aligned(p.out_strides.head) &&
                    aligned(p.out_strides.row) && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;

  constexpr auto kernel = forward_kernel<Op, C, kVector, kHasBiasMask>;
  return launch<kernel>(blocks, C::kThreads, kSharedBytes, p.device, stream, p, plan);
}

// Tile shapes of a padded head dimension: docs/develop/kernels/sm75.md.
template <int kHeadDim>
struct Shapes;
template <>
struct Shapes<32> {
  using Long = Tiling<32, 128, 64, 4, 3>;
  using Short =
      Tiling<32, 64, 32, 4, 3>;  // no sequence over 64 queries, or pairs, which take registers
};
template <>
struct Shapes<64> {
  using Long = Tiling<64, 128, 64, 4, 2>;
  using Short = Tiling<64, 64, 32, 4, 3>;
};
template <>
struct Shapes<96> {
  using Long = Tiling<96, 128, 32, 4, 2>;
  using Short = Tiling<96, 64, 32, 4, 2>;
};
template <>
struct Shapes<128> {
  using Long = Tiling<128, 128, 64, 8, 1>;
  using Short = Tiling<128, 64, 32, 4, 2>;
};
template <>
struct Shapes<192> {
  using Long = Tiling<192, 128, 32, 8, 1>;
  using Short = Long;
};
template <>
struct Shapes<256> {
  using Long = Tiling<256, 128, 32, 8, 1>;
  using Short = Long;
};

template <class Op, int kHeadDim>
cudaError_t launch_padded(const FlashsciForwardParams& p, cudaStream_t stream) {
  using Long = typename Shapes<kHeadDim>::Long;
  using Short = typename Shapes<kHeadDim>::Short;
  const bool vector =
      p.copy_bytes >= 16 && p.head_dim % kChunkElements == 0 && p.head_dim_v % kChunkElements == 0;
  if (p.bias_mask.bias != nullptr || p.bias_mask.mask != nullptr)
    return vector ? launch_tiling<Op, Short, true, true>(p, stream)
                  : launch_tiling<Op, Short, false, true>(p, stream);
  if (!vector) return launch_tiling<Op, Long, false, false>(p, stream);
  const int longest = p.cu_seqlens_q != nullptr ? p.max_seqlen_q : p.seq_q;
  if (longest >= 0 && longest <= Short::kBlockQ)
    return launch_tiling<Op, Short, true, false>(p, stream);
  return launch_tiling<Op, Long, true, false>(p, stream);
}

// Picks the smallest padded head dimension that holds D and Dv.
template <class Op>
cudaError_t launch_forward(const FlashsciForwardParams& p, cudaStream_t stream) {
  const int dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  if (dim <= 32) return launch_padded<Op, 32>(p, stream);
  if (dim <= 64) return launch_padded<Op, 64>(p, stream);
  if (dim <= 96) return launch_padded<Op, 96>(p, stream);
  if (dim <= 128) return launch_padded<Op, 128>(p, stream);
  if (dim <= 192) return launch_padded<Op, 192>(p, stream);
  if (dim <= 256) return launch_padded<Op, 256>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace flashsci::sm75::fwd
