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

cudaError_t launch_forward_fp32(const FlashsciForwardParams& p, cudaStream_t stream) {
  const int dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  if (dim <= 16) return launch<ForwardTile<16, 4, 2, 8, 2>>(p, stream);
  if (dim <= 32) return launch<ForwardTile<32, 4, 2, 8, 2>>(p, stream);
  if (dim <= 64) return launch<ForwardTile<64, 4, 2, 8, 2>>(p, stream);
  if (dim <= 128) return launch<ForwardTile<128, 4, 1, 4, 2>>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace flashsci::sm80

extern "C" int flashsci_forward_sm80_fp32(const FlashsciForwardParams* params,
                                          FlashsciStream stream) {
  return flashsci::sm80::launch_forward_fp32(*params, static_cast<cudaStream_t>(stream));
}
