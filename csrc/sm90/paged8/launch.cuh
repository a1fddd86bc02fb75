// The host side of paged attention from 8-bit caches, beside paged/launch.cuh.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../paged/launch.cuh"
#include "config.cuh"
#include "kernel.cuh"

namespace flashsci::sm90::paged8 {

inline constexpr int kBlock = Tiling<64>::kBlockK;  // that of all

inline int64_t workspace_of(const FlashsciPagedParams& p) { return paged::workspace_of(p, kBlock); }

template <class Op, class Format, int kHeadDim>
cudaError_t launch_padded(const FlashsciPaged8Params& p, cudaStream_t stream) {
  using C = Tiling<kHeadDim>;
  static_assert(C::kBlockK == kBlock);
  constexpr int kSharedBytes = sizeof(Storage<C>) + 1024;
  static_assert(kSharedBytes <= 227 * 1024, "the shared memory of an SM");
  Args args;
  const cudaError_t error = paged::fill_args<C>(args.call, p.call, kByte);
  if (error != cudaSuccess) return error;
  args.k = {p.k_scale, p.k_scale_sequence, p.k_scale_head};
  args.v = {p.v_scale, p.v_scale_sequence, p.v_scale_head};
  return paged::launch_all<Op, C, paged8_kernel<Op, Format, C>>(args, args.call, kSharedBytes,
                                                                stream);
}

template <class Op, class Format>
cudaError_t launch_format(const FlashsciPaged8Params& p, cudaStream_t stream) {
  switch (paged::padded_dim(p.call)) {
    case 64:
      return launch_padded<Op, Format, 64>(p, stream);
    case 128:
      return launch_padded<Op, Format, 128>(p, stream);
    default:
      return launch_padded<Op, Format, 256>(p, stream);
  }
}

template <class Op>
cudaError_t launch(const FlashsciPaged8Params& p, cudaStream_t stream) {
  if (!paged::takes_sizes(p.call, kBlock) || !paged::takes_rows(p.call))
    return cudaErrorNotSupported;
  return p.e5m2 ? launch_format<Op, E5m2>(p, stream) : launch_format<Op, E4m3>(p, stream);
}

}  // namespace flashsci::sm90::paged8
