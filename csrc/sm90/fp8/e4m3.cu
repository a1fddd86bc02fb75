// The sm90 forward on 8-bit floats, all head dimensions.
#include "launch.cuh"

#if defined(__CUDA_FP8_H__) || defined(__CUDA_FP16_H__) || defined(__CUDA_BF16_H__)
#error "dtypes are those of csrc/ptx: the unit must not see the toolkit's headers of them"
#endif
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "the 8-bit unit is built for sm_90a only"
#endif

extern "C" int flashsci_forward_sm90_e4m3(const FlashsciFp8ForwardParams* params,
                                          FlashsciStream stream) {
  return flashsci::sm90::fp8::launch_forward(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_forward_sm90_e4m3_workspace(const FlashsciFp8ForwardParams* params) {
  return flashsci::sm90::fp8::forward_workspace(*params);
}
