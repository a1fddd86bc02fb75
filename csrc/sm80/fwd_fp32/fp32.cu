// fp32 instances of the sm80 forward, head dimensions up to 256.
#include "launch.cuh"

namespace flashsci::sm80::fwd_fp32 {
namespace {

// Dims, warps, m16 blocks per warp, n8 blocks of keys, CTAs an SM; without and with bias or mask.
template <class Plain, class WithBiasMask>
cudaError_t launch(const FlashsciForwardParams& p, cudaStream_t stream) {
  return p.bias_mask.bias != nullptr || p.bias_mask.mask != nullptr
             ? launch_forward_tile<WithBiasMask, true>(p, stream)
             : launch_forward_tile<Plain, false>(p, stream);
}

cudaError_t launch_forward_fp32(const FlashsciForwardParams& p, cudaStream_t stream) {
  const int dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  const int longest = p.cu_seqlens_q != nullptr ? -1 : p.seq_q;
  if (dim <= 16 && longest >= 0 && longest <= 32)  // one warp
    return launch<ForwardTile<16, 1, 2, 4, 8>, ForwardTile<16, 1, 2, 4, 8>>(p, stream);
  if (dim <= 16) return launch<ForwardTile<16, 4, 1, 8, 4>, ForwardTile<16, 4, 1, 8, 2>>(p, stream);
  if (dim <= 32) return launch<ForwardTile<32, 4, 2, 8, 2>, ForwardTile<32, 4, 1, 8, 2>>(p, stream);
  if (dim <= 64) return launch<ForwardTile<64, 4, 2, 8, 2>, ForwardTile<64, 4, 1, 8, 2>>(p, stream);
  if (dim <= 128)
    return launch<ForwardTile<128, 4, 1, 4, 2>, ForwardTile<128, 4, 1, 4, 1>>(p, stream);
  // 64 rows of queries and their tiles of keys take 129 KiB, 32 rows 97.
  using Wide = ForwardTile<256, 4, 1, 2, 1>;
  using Narrow = ForwardTile<256, 2, 1, 2, 1>;
  if (dim <= 256)
    return p.shared_per_sm > 132 * 1024 ? launch<Wide, Wide>(p, stream)
                                        : launch<Narrow, Narrow>(p, stream);
  return cudaErrorNotSupported;
}

}  // namespace
}  // namespace flashsci::sm80::fwd_fp32

extern "C" int flashsci_forward_sm80_fp32(const FlashsciForwardParams* params,
                                          FlashsciStream stream) {
  return flashsci::sm80::fwd_fp32::launch_forward_fp32(*params, static_cast<cudaStream_t>(stream));
}
