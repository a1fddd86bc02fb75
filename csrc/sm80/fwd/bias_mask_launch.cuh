// The host side of the sm80 forward with a bias or a mask.
#pragma once
#include <cuda_runtime.h>
#include <algorithm>
#include <cstdint>

#include "../../core/launch.cuh"
#include "bias_mask_kernel.cuh"
#include "launch.cuh"

namespace flashsci::sm80::fwd {

// Whether scores may stay in units of 1 / scale, and the bias be divided by it, without overflow.
inline bool scale_fits(float scale) { return scale > 1e-4f && scale * kLog2e <= 1.f; }

template <class Op, class C, bool kVector, class... Drop>
cudaError_t launch_bias_mask_tiling(const FlashsciForwardParams& p, BiasMaskPlan bias_mask,
                                    cudaStream_t stream, const Drop&... dropout) {
  using Storage = BiasMaskStorage<C>;
  constexpr int kOfMembers = C::kMembers * C::kBlockK * (4 * C::kHeadDim + 1);
  constexpr int kOfBias = C::kBlockQ * C::kBlockK * (C::kBias == 2 ? 2 : 4);
  static_assert(sizeof(BiasMaskStage<C>) == (kOfMembers + kOfBias + 127) / 128 * 128 &&
                    sizeof(Storage) == C::kUnitsQ * C::kMembers * C::kBlockQ * C::kHeadDim * 2 +
                                           C::kSlots * sizeof(BiasMaskStage<C>),
                "the plan has no padding");
  static_assert(sizeof(Storage) <= 99 * 1024, "sm_86 and sm_89 have no more");
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t tiles = num_tiles(p.seq_q, C::kBlockQ, p.num_seqs, packed);
  bias_mask.groups = (bias_mask.members + C::kMembers - 1) / C::kMembers;
  const int64_t units =
      tiles * p.heads_q * p.batch0 * p.batch1 / std::max(bias_mask.members, 1u) * bias_mask.groups;
  if (units == 0) return cudaSuccess;
  if (units > INT32_MAX || p.batch0 * p.batch1 > INT32_MAX) return cudaErrorInvalidValue;
  // Units of different length are left to the hardware's scheduler.
  int64_t blocks = units;
  if (C::kPersistent && !packed && p.window_left < 0 && p.window_right < 0)
    blocks = std::min<int64_t>(units, int64_t{C::kMinBlocks} * processors_of(p.device));
  bias_mask.units = static_cast<uint32_t>(units / blocks);
  bias_mask.units_rest = static_cast<uint32_t>(units % blocks);

  ForwardPlan plan = plan_of(p, tiles);
  // Otherwise the units of the scores are those of the exponential.
  if (plan.scores.mode == kScaled && !scale_fits(p.scale)) plan.scores.mode = kLinear;
  if (plan.scores.mode == kScaled) {
    bias_mask.bias_factor = 1.f / p.scale;
  } else {
    plan.scores.inner *= plan.scores.mode == kLinear ? kLog2e : 1.f;
    plan.scores.outer *= kLog2e;
    plan.scores.exp_scale = 1.f;
    bias_mask.bias_factor = p.bias_mask.capped ? 1.f : kLog2e;
  }
  plan.lse_scale = plan.scores.mode == kScaled ? p.scale : kLn2;
  return launch<forward_bias_mask_kernel<Op, C, kVector, Drop...>>(
      blocks, C::kThreads, sizeof(Storage), p.device, stream, p, plan, bias_mask, dropout...);
}

template <class Op, int kHeadDim>
cudaError_t launch_bias_mask_padded(const FlashsciForwardParams& p, const BiasMaskPlan& bias_mask,
                                    cudaStream_t stream) {
  const bool vector =
      p.copy_bytes >= 16 && p.head_dim % kChunkElements == 0 && p.head_dim_v % kChunkElements == 0;
  // sm_86 and sm_89 have 99 KiB.
  using Wide = Tiling<kHeadDim,
                      (kHeadDim <= 128   ? 128
                       : kHeadDim <= 192 ? 64
                                         : 32),
                      32, (kHeadDim <= 192 ? 4 : 2), 2, 2>;
  if (!vector) {
    // Copies without alignment need registers.
    using Unaligned = std::conditional_t<kHeadDim == 128, Tiling<128, 64, 32, 4, 2, 2>, Wide>;
    return launch_bias_mask_tiling<Op, BiasMaskTiling<Unaligned, 1, 0>, false>(p, bias_mask,
                                                                               stream);
  }
  if constexpr (kHeadDim <= 64) {
    const bool plain = bias_mask.bias_copy == 16 &&
                       (p.bias_mask.mask == nullptr || bias_mask.key_mask) && p.window_left < 0 &&
                       p.window_right < 0 && p.softcap == 0.f && scale_fits(p.scale);
    // Two outputs of D = 64 leave no room for Q.
    constexpr int kMost = kHeadDim <= 32 ? 2 : 1;
    if (plain && bias_mask.shares)
      return p.bias_mask.bias_is_fp32
                 ? launch_bias_mask_tiling<Op, BiasMaskTiling<Wide, kMost, 4>, true>(p, bias_mask,
                                                                                     stream)
                 : launch_bias_mask_tiling<Op, BiasMaskTiling<Wide, kMost, 2>, true>(p, bias_mask,
                                                                                     stream);
    if (plain)
      return p.bias_mask.bias_is_fp32
                 ? launch_bias_mask_tiling<Op, BiasMaskTiling<Wide, 1, 4>, true>(p, bias_mask,
                                                                                 stream)
                 : launch_bias_mask_tiling<Op, BiasMaskTiling<Wide, 1, 2>, true>(p, bias_mask,
                                                                                 stream);
  }
  return launch_bias_mask_tiling<Op, BiasMaskTiling<Wide, 1, 0>, true>(p, bias_mask, stream);
}

// The arguments that do not depend on the tile shape.
inline BiasMaskPlan bias_mask_plan_of(const FlashsciForwardParams& p) {
  const FlashsciScoreStrides &bias = p.bias_mask.bias_strides, &mask = p.bias_mask.mask_strides;
  BiasMaskPlan bias_mask{};
  if (p.bias_mask.bias != nullptr && !has_slopes(p.bias_mask) && bias.column == 1) {
    const int size = p.bias_mask.bias_is_fp32 ? 4 : 2;
    const uint64_t bits =
        reinterpret_cast<uintptr_t>(p.bias_mask.bias) |
        static_cast<uint64_t>(bias.batch0 | bias.batch1 | bias.head | bias.row) * size | 16;
    bias_mask.bias_copy = static_cast<int32_t>(bits & -bits);
    if (p.seq_k * int64_t{size} % 16 != 0) bias_mask.bias_copy = std::min(bias_mask.bias_copy, 8);
    if (has_ragged_bias(p)) bias_mask.bias_copy = size;  // rows begin anywhere
  }
  // The last word of a row may end behind the keys, before the next row.
  bias_mask.aligned_mask = mask.column == 1 && (p.seq_k % 4 == 0 || mask.row > p.seq_k) &&
                           (mask.batch0 | mask.batch1 | mask.head | mask.row) % 4 == 0 &&
                           reinterpret_cast<uintptr_t>(p.bias_mask.mask) % 4 == 0;
  bias_mask.key_mask = p.bias_mask.mask != nullptr && mask.row == 0;

  // The members of a unit differ in the largest dimension along which the bias, and a mask of
  // pairs, is the same.
  const bool bias_plane = p.bias_mask.bias != nullptr;
  const bool mask_plane = p.bias_mask.mask != nullptr && mask.row != 0;
  const bool one_to_one = p.heads_k == p.heads_q || p.heads_k == 1;
  const int64_t sizes[3] = {p.batch0, p.batch1, p.heads_q};
  const bool shared[3] = {!(bias_plane && bias.batch0) && !(mask_plane && mask.batch0),
                          !(bias_plane && bias.batch1) && !(mask_plane && mask.batch1),
                          !(bias_plane && bias.head) && !(mask_plane && mask.head) && one_to_one};
  int dim = 2;
  for (int i = 0; i < 3; ++i) {
    if (!shared[i] || sizes[i] < 2 || !(bias_plane || mask_plane)) continue;
    if (!bias_mask.shares || sizes[i] > sizes[dim]) dim = i;
    bias_mask.shares = 1;
  }
  bias_mask.shared_dim = dim;
  bias_mask.members = static_cast<uint32_t>(sizes[dim]);
  const auto step = [&](const auto& strides) {
    return dim == 0 ? strides.batch0 : dim == 1 ? strides.batch1 : strides.head;
  };
  bias_mask.q_step = step(p.q_strides), bias_mask.out_step = step(p.out_strides);
  bias_mask.k_step = dim == 2 && p.heads_k == 1 ? 0 : step(p.k_strides);
  bias_mask.v_step = dim == 2 && p.heads_k == 1 ? 0 : step(p.v_strides);
  bias_mask.mask_step = p.bias_mask.mask != nullptr ? step(mask) : 0;
  bias_mask.lse_step = int64_t{p.seq_q} * (dim == 2 ? 1 : p.heads_q * (dim == 1 ? 1 : p.batch1));
  return bias_mask;
}

// Dense problems with a bias or a mask, and packed ones with a bias; any strides.
template <class Op>
cudaError_t launch_forward_bias_mask(const FlashsciForwardParams& p, cudaStream_t stream) {
  if (p.cu_seqlens_q != nullptr && !has_ragged_bias(p)) return cudaErrorNotSupported;
  const BiasMaskPlan bias_mask = bias_mask_plan_of(p);
  const int width = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  if (width <= 32) return launch_bias_mask_padded<Op, 32>(p, bias_mask, stream);
  if (width <= 64) return launch_bias_mask_padded<Op, 64>(p, bias_mask, stream);
  if (width <= 96) return launch_bias_mask_padded<Op, 96>(p, bias_mask, stream);
  if (width <= 128) return launch_bias_mask_padded<Op, 128>(p, bias_mask, stream);
  if (width <= 192) return launch_bias_mask_padded<Op, 192>(p, bias_mask, stream);
  if (width <= 256) return launch_bias_mask_padded<Op, 256>(p, bias_mask, stream);
  return cudaErrorInvalidValue;
}

// Any call: the kernels of launch.cuh take slopes of ALiBi without a mask, also of packed calls.
template <class Op>
cudaError_t launch_any_forward(const FlashsciForwardParams& p, cudaStream_t stream) {
  if (p.bias_mask.mask == nullptr && has_slopes(p.bias_mask))
    return launch_forward<Op, true>(p, stream);
  return p.bias_mask.bias != nullptr || p.bias_mask.mask != nullptr
             ? launch_forward_bias_mask<Op>(p, stream)
             : launch_forward<Op>(p, stream);
}

}  // namespace flashsci::sm80::fwd
