// The host side of calls with dropout: the kernels of csrc/sm80/fwd and csrc/sm80/bwd in 16 bits,
// with dropout as their last argument.
//
// The library has each kernel for two dtypes and several architectures, so there are few of them:
// head dims are padded to 64 or 128; calls whose rows take no 16-byte copies, dq of deterministic
// calls and the gradient of a shared bias have one tile for all head dims.
#pragma once
#include <algorithm>

#include "../../include/flashsci_dropout.h"
#include "../bwd/launch.cuh"
#include "../fwd/bias_mask_launch.cuh"

namespace flashsci::sm80::dropout {

// The forward: head dim, queries, keys, warps, stages, CTAs an SM. Few keys: the bits of dropout need
// registers.
template <int kHeadDim>
struct ForwardTiles;
template <>
struct ForwardTiles<64> {
  using Plain = fwd::Tiling<64, 128, 32, 4, 2, 2>;
  using BiasMask = fwd::BiasMaskTiling<fwd::Tiling<64, 128, 32, 4, 2, 2>, 1, 0>;
};
template <>
struct ForwardTiles<128> {
  using Plain = fwd::Tiling<128, 128, 32, 4, 2, 2>;
  using Unaligned = fwd::Tiling<128, 64, 32, 4, 1, 2>;
  using BiasMask = fwd::BiasMaskTiling<fwd::Tiling<128, 64, 32, 4, 2, 2>, 1, 0>;
};

// The backward: those of keys are those of calls with a bias.
template <int kHeadDim>
struct BackwardTiles : bwd::KeyTiles<kHeadDim> {
  using Queries = dq::QueryTiling<128, 64, 32, 2, 2>;
  using Bias = dbias::BiasTiling<128, 64, 32, 1, 2>;
};

template <class Params>
int width_of(const Params& p) {
  return std::max(p.head_dim, p.head_dim_v);
}

// Slopes of ALiBi are a bias here; packed calls have none, and no mask.
template <class Op, int kHeadDim, bool kVector>
cudaError_t launch_padded_forward(const FlashsciForwardParams& p, const FlashsciDropout& dropout,
                                  cudaStream_t stream) {
  using Tiles = ForwardTiles<kHeadDim>;
  if (p.bias_mask.bias != nullptr || p.bias_mask.mask != nullptr)
    return p.cu_seqlens_q != nullptr
               ? cudaErrorNotSupported
               : fwd::launch_bias_mask_tiling<Op, typename Tiles::BiasMask, kVector>(
                     p, fwd::bias_mask_plan_of(p), stream, dropout);
  if constexpr (kVector)
    return fwd::launch_tiling<Op, typename Tiles::Plain, true, false>(p, stream, dropout);
  else
    return fwd::launch_tiling<Op, typename Tiles::Unaligned, false, false>(p, stream, dropout);
}

template <class Op>
cudaError_t launch_forward(const FlashsciForwardParams& p, const FlashsciDropout& dropout,
                           cudaStream_t stream) {
  if (width_of(p) > FLASHSCI_MAX_DROPOUT_HEAD_DIM) return cudaErrorNotSupported;
  const bool vector =
      p.copy_bytes >= 16 && p.head_dim % kChunkElements == 0 && p.head_dim_v % kChunkElements == 0;
  if (!vector) return launch_padded_forward<Op, 128, false>(p, dropout, stream);
  return width_of(p) <= 64 ? launch_padded_forward<Op, 64, true>(p, dropout, stream)
                           : launch_padded_forward<Op, 128, true>(p, dropout, stream);
}

template <class Op>
cudaError_t launch_backward(const FlashsciBackwardParams& p, const FlashsciDropout& dropout,
                            cudaStream_t stream) {
  if (width_of(p) > FLASHSCI_MAX_DROPOUT_HEAD_DIM) return cudaErrorNotSupported;
  return width_of(p) <= 64 ? bwd::launch_padded<Op, BackwardTiles<64>>(p, stream, dropout)
                           : bwd::launch_padded<Op, BackwardTiles<128>>(p, stream, dropout);
}

inline int64_t backward_workspace(const FlashsciBackwardParams& p) {
  return width_of(p) <= 64 ? bwd::plan_work<BackwardTiles<64>>(p).bytes()
                           : bwd::plan_work<BackwardTiles<128>>(p).bytes();
}

}  // namespace flashsci::sm80::dropout
