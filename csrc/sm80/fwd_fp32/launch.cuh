// The host side of the fp32 forward.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../core/launch.cuh"
#include "kernel.cuh"

namespace flashsci::sm80::fwd_fp32 {

template <class C, bool kHasBiasMask>
cudaError_t launch_forward_tile(const FlashsciForwardParams& p, cudaStream_t stream) {
  ForwardFp32Plan plan;
  const int64_t tiles = num_tiles(p.seq_q, C::kBlockQ, p.num_seqs, p.cu_seqlens_q != nullptr);
  const int64_t blocks = tiles * p.heads_q * p.batch0 * p.batch1;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX || p.batch0 * p.batch1 > INT32_MAX) return cudaErrorInvalidValue;
  plan.tiles = static_cast<uint32_t>(tiles);
  plan.vector = p.copy_bytes == 16 && (p.head_dim | p.head_dim_v) % 4 == 0;
  plan.plain = !kHasBiasMask && p.softcap == 0.f && p.scale > 0.f;
  const bool first = p.softcap != 0.f && !p.bias_mask.capped;  // nothing is added before the cap
  plan.inner = first ? p.scale / p.softcap : plan.plain ? p.scale * kLog2e : p.scale;
  plan.cap = p.softcap;
  plan.inverse_cap = p.bias_mask.capped ? 1.f / p.softcap : 0.f;
  plan.vector_out = takes_paired_stores(p.out, p.out_strides, p.head_dim_v);
  plan.bias_mask = BiasMaskAccess::of(p, p.bias_mask, p.seq_k);

  constexpr auto kernel = forward_fp32_kernel<C, kHasBiasMask>;
  constexpr int kSharedBytes = sizeof(ForwardStorage<C>);
  static_assert(kSharedBytes <= (C::kDim <= 128 ? 99 : 131) * 1024,
                "a block has 99 KiB on the smallest device, 163 where the widest tile is used");
  return launch<kernel>(blocks, C::kThreads, kSharedBytes, p.device, stream, p, plan);
}

}  // namespace flashsci::sm80::fwd_fp32
