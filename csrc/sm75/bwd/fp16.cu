// fp16 instances of the sm75 backward, head dimensions up to 128.
#include "../../core/dtype_f16_turing.cuh"
#include "launch.cuh"

#if defined(__CUDA_BF16_H__) || defined(BFLOAT16)
#error "the fp16 unit must not see cuda_bf16.h"
#endif

extern "C" int flashsci_backward_sm75_fp16(const FlashsciBackwardParams* params,
                                           FlashsciStream stream) {
  return flashsci::sm75::bwd::launch_backward<flashsci::Float16Turing>(
      *params, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_backward_sm75_fp16_workspace(const FlashsciBackwardParams* params) {
  return flashsci::sm75::bwd::backward_workspace(*params);
}
