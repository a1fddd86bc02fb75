// bf16 instances of the sm80 backward, all head dimensions.
#include "../../core/dtype_bf16.cuh"
#include "launch.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "bf16 units are built for compute capability 8.0 and newer only"
#endif

extern "C" int flashsci_backward_sm80_bf16(const FlashsciBackwardParams* params,
                                           FlashsciStream stream) {
  return flashsci::sm80::bwd::launch_backward<flashsci::BFloat16>(
      *params, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_backward_sm80_bf16_workspace(const FlashsciBackwardParams* params) {
  return flashsci::sm80::bwd::backward_workspace(*params);
}
