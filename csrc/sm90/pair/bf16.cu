// bf16 instances of attention with a bias whose heads lie side by side.
#include "../../core/dtype_bf16.cuh"
#include "launch.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#error "built for compute capability 9.0 only"
#endif

extern "C" int flashsci_forward_pair_bf16(const FlashsciForwardParams* params,
                                          FlashsciStream stream) {
  return flashsci::sm90::pair::launch_forward<flashsci::BFloat16>(
      *params, static_cast<cudaStream_t>(stream));
}

extern "C" int flashsci_takes_pair_bf16(const FlashsciForwardParams* params) {
  return flashsci::sm90::pair::takes_call<flashsci::BFloat16>(*params);
}
