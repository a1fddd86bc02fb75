// bf16 instances of the sm80 forward and backward with dropout, head dimensions up to 128.
#include "../../core/dtype_bf16.cuh"
#include "launch.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "bf16 units are built for compute capability 8.0 and newer only"
#endif

extern "C" int flashsci_forward_dropout_bf16(const FlashsciForwardParams* params,
                                             const FlashsciDropout* dropout,
                                             FlashsciStream stream) {
  return flashsci::sm80::dropout::launch_forward<flashsci::BFloat16>(
      *params, *dropout, static_cast<cudaStream_t>(stream));
}

extern "C" int flashsci_backward_dropout_bf16(const FlashsciBackwardParams* params,
                                              const FlashsciDropout* dropout,
                                              FlashsciStream stream) {
  return flashsci::sm80::dropout::launch_backward<flashsci::BFloat16>(
      *params, *dropout, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_backward_dropout_bf16_workspace(const FlashsciBackwardParams* params) {
  return flashsci::sm80::dropout::backward_workspace(*params);
}
