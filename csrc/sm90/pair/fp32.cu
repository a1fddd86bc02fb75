// fp32 instances of attention with a bias whose heads are neighbours in memory.
#include "launch.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#error "units of sm90 are built for compute capability 9.0 only"
#endif

extern "C" int flashsci_forward_pair_fp32(const FlashsciForwardParams* params,
                                          FlashsciStream stream) {
  return flashsci::sm90::pair::launch_forward(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int flashsci_backward_pair_fp32(const FlashsciBackwardParams* params,
                                           FlashsciStream stream) {
  return flashsci::sm90::pair::launch_backward(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_backward_pair_fp32_workspace(const FlashsciBackwardParams* params) {
  return flashsci::sm90::pair::backward_workspace(*params);
}

extern "C" int flashsci_takes_pair_fp32(const FlashsciForwardParams* params) {
  return flashsci::sm90::pair::takes(*params);
}
