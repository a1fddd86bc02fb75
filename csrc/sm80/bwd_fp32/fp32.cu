// fp32 instances of the sm80 backward: head dimensions up to 128, and up to 256 if a block has 227
// KiB of shared memory.
#include <algorithm>

#include "launch.cuh"

namespace flashsci::sm80::bwd_fp32 {
namespace {

// Dims, warps, m16 blocks of a warp, n8 blocks of columns, CTAs an SM.
template <int... kShape>
using Tile = BackwardTile<kShape...>;

// Uses of the tiles of a head dimension: those of keys, of queries, of the bias.
template <class Do>
auto with_tiles(const FlashsciBackwardParams& p, Do&& act) {
  const int dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  if (dim <= 16)
    return act(Tiles<Tile<16, 4, 2, 4, 2>, Tile<16, 4, 1, 4, 2>>{}, Tiles<Tile<16, 4, 2, 4, 2>>{},
               Tile<16, 4, 2, 4, 2>{});
  if (dim <= 32)
    return act(Tiles<Tile<32, 4, 2, 4, 2>, Tile<32, 4, 1, 4, 2>>{}, Tiles<Tile<32, 4, 2, 4, 2>>{},
               Tile<32, 4, 2, 4, 2>{});
  if (dim <= 64)
    return act(Tiles<Tile<64, 4, 1, 4, 2>>{}, Tiles<Tile<64, 4, 2, 4, 2>, Tile<64, 4, 1, 4, 2>>{},
               Tile<64, 4, 1, 4, 2>{});
  if (dim <= 128)
    return act(Tiles<Tile<128, 4, 1, 2, 1>>{}, Tiles<Tile<128, 4, 1, 2, 1>>{},
               Tile<128, 4, 1, 2, 1>{});
  return act(Tiles<Tile<256, 4, 1, 2, 1>>{}, Tiles<Tile<256, 4, 1, 2, 1>>{},
             Tile<256, 4, 1, 2, 1>{});
}

}  // namespace
}  // namespace flashsci::sm80::bwd_fp32

extern "C" int flashsci_backward_sm80_fp32(const FlashsciBackwardParams* params,
                                           FlashsciStream stream) {
  using namespace flashsci::sm80::bwd_fp32;
  const int dim = std::max(params->head_dim, params->head_dim_v);
  if (dim > (params->shared_per_sm > 200 * 1024 ? 256 : 128)) return cudaErrorNotSupported;
  return with_tiles(*params, [&](auto keys, auto queries, auto bias) -> int {
    return launch_backward_tiles<decltype(keys), decltype(queries), decltype(bias)>(
        *params, static_cast<cudaStream_t>(stream));
  });
}

extern "C" int64_t flashsci_backward_sm80_fp32_workspace(const FlashsciBackwardParams* params) {
  using namespace flashsci::sm80::bwd_fp32;
  return with_tiles(*params, [&](auto, auto, auto bias) -> int64_t {
    const BackwardFp32Work work = plan_work<decltype(bias)>(*params);
    return work.statistics_bytes + work.bias_bytes;
  });
}
