// fp32 instances of the sm80 backward, all head dimensions.
#include "backward_launch_fp32.cuh"

namespace flashsci::sm80 {
namespace {

#ifndef K16
#define K16 4, 2, 8, 2
#define K32 4, 2, 4, 2
#define K64 4, 2, 4, 2
#define K128 4, 1, 2, 2
#define Q16 4, 2, 8, 2
#define Q32 4, 2, 8, 2
#define Q64 4, 2, 4, 2
#define Q128 4, 1, 2, 2
#endif
// What is done with the tiles of a head dimension.
template <class Do>
auto with_tiles(const FlashsciBackwardParams& p, Do&& act) {
  const int dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  if (dim <= 16) return act(BackwardTile<16, K16>{}, BackwardTile<16, Q16>{}, BackwardTile<16, Q16>{});
  if (dim <= 32) return act(BackwardTile<32, K32>{}, BackwardTile<32, Q32>{}, BackwardTile<32, Q32>{});
  if (dim <= 64) return act(BackwardTile<64, K64>{}, BackwardTile<64, Q64>{}, BackwardTile<64, Q64>{});
  return act(BackwardTile<128, K128>{}, BackwardTile<128, Q128>{}, BackwardTile<128, Q128>{});
}

}  // namespace
}  // namespace flashsci::sm80

extern "C" int flashsci_backward_sm80_fp32(const FlashsciBackwardParams* params,
                                           FlashsciStream stream) {
  using namespace flashsci::sm80;
  return with_tiles(*params, [&](auto keys, auto queries, auto bias) -> int {
    return launch_backward_tiles<decltype(keys), decltype(queries), decltype(bias)>(
        *params, static_cast<cudaStream_t>(stream));
  });
}

extern "C" int64_t flashsci_backward_sm80_fp32_workspace(const FlashsciBackwardParams* params) {
  using namespace flashsci::sm80;
  return with_tiles(*params, [&](auto, auto, auto bias) -> int64_t {
    const BackwardFp32Work work = plan_work<decltype(bias)>(*params);
    return work.statistics_bytes + work.bias_bytes;
  });
}
