// bf16 instances of the sm80 forward, all head dimensions.
#include "../../core/dtype_bf16.cuh"
#include "bias_mask_launch.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "bf16 units are built for compute capability 8.0 and newer only"
#endif

extern "C" int flashsci_forward_sm80_bf16(const FlashsciForwardParams* params,
                                          FlashsciStream stream) {
  return flashsci::sm80::fwd::launch_any_forward<flashsci::BFloat16>(
      *params, static_cast<cudaStream_t>(stream));
}
