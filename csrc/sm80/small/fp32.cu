// fp32 instances of attention of short sequences.

#include "../../include/flashsci_small.h"
#include "launch.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "units of sm80 are built for compute capability 8.0 and newer only"
#endif

extern "C" int flashsci_forward_small_fp32(const FlashsciForwardParams* params,
                                           FlashsciStream stream) {
  using namespace flashsci::sm80::small;
  const auto launch =
      is_weighted(*params) ? launch_forward<WeightedProducts32> : launch_forward<Products32>;
  return launch(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int flashsci_backward_small_fp32(const FlashsciBackwardParams* params,
                                            FlashsciStream stream) {
  using namespace flashsci::sm80::small;
  const auto launch =
      is_weighted(*params) ? launch_backward<WeightedProducts32> : launch_backward<Products32>;
  return launch(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_backward_small_fp32_workspace(const FlashsciBackwardParams*) {
  return 0;
}
