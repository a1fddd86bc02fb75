// fp16 instances of the sm75 forward, all head dimensions.
#include "../../core/dtype_f16_turing.cuh"
#include "launch.cuh"

#if defined(__CUDA_BF16_H__) || defined(BFLOAT16)
#error "the fp16 unit must not see cuda_bf16.h"
#endif

extern "C" int flashsci_forward_sm75_fp16(const FlashsciForwardParams* params,
                                          FlashsciStream stream) {
  return flashsci::sm75::fwd::launch_forward<flashsci::Float16Turing>(
      *params, static_cast<cudaStream_t>(stream));
}
