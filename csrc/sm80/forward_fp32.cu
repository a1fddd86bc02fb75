// fp32 instances of the sm80 forward, all head dimensions.
#include "forward_fp32.cuh"

namespace flashsci::sm80 {
namespace {

// Dims, warps, m16 blocks of a warp, n8 blocks of keys, CTAs an SM.
template <class C>
cudaError_t launch(const FlashsciForwardParams& p, cudaStream_t stream) {
  if (p.pairs.bias != nullptr || p.pairs.mask != nullptr) return launch_forward_tile<C, true>(p, stream);
  return launch_forward_tile<C, false>(p, stream);
}

#ifndef C16
#define C16 4, 2, 8, 2
#define C32 4, 2, 8, 2
#define C64 4, 2, 8, 2
#define C128 4, 1, 4, 2
#endif
cudaError_t launch_forward_fp32(const FlashsciForwardParams& p, cudaStream_t stream) {
  const int dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
#ifdef TINY
  if (dim <= 16 && p.seq_q <= 32 && p.cu_seqlens_q == nullptr) return launch<ForwardTile<16, 1, 2, 4, 12>>(p, stream);
  if (dim <= 32 && p.seq_q <= 32 && p.cu_seqlens_q == nullptr) return launch<ForwardTile<32, 1, 2, 4, 10>>(p, stream);
#endif
  if (dim <= 16) return launch<ForwardTile<16, C16>>(p, stream);
  if (dim <= 32) return launch<ForwardTile<32, C32>>(p, stream);
  if (dim <= 64) return launch<ForwardTile<64, C64>>(p, stream);
  if (dim <= 128) return launch<ForwardTile<128, C128>>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace flashsci::sm80

extern "C" int flashsci_forward_sm80_fp32(const FlashsciForwardParams* params,
                                          FlashsciStream stream) {
  return flashsci::sm80::launch_forward_fp32(*params, static_cast<cudaStream_t>(stream));
}
