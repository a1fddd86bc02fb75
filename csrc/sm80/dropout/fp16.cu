// fp16 instances of the sm80 forward and backward with dropout, head dimensions up to 128.
#include "../../core/dtype_f16.cuh"
#include "launch.cuh"

#if defined(__CUDA_BF16_H__) || defined(BFLOAT16)
#error "the fp16 unit must not see cuda_bf16.h"
#endif

extern "C" int flashsci_forward_dropout_fp16(const FlashsciForwardParams* params,
                                             const FlashsciDropout* dropout,
                                             FlashsciStream stream) {
  return flashsci::sm80::dropout::launch_forward<flashsci::Float16>(
      *params, *dropout, static_cast<cudaStream_t>(stream));
}

extern "C" int flashsci_backward_dropout_fp16(const FlashsciBackwardParams* params,
                                              const FlashsciDropout* dropout,
                                              FlashsciStream stream) {
  return flashsci::sm80::dropout::launch_backward<flashsci::Float16>(
      *params, *dropout, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_backward_dropout_fp16_workspace(const FlashsciBackwardParams* params) {
  return flashsci::sm80::dropout::backward_workspace(*params);
}
