// fp16 instances of the sm80 forward, all head dimensions.
#include "../../core/dtype_f16.cuh"
#include "bias_mask_launch.cuh"

#if defined(__CUDA_BF16_H__) || defined(BFLOAT16)
#error "the fp16 unit must not see cuda_bf16.h"
#endif

extern "C" int flashsci_forward_sm80_fp16(const FlashsciForwardParams* params,
                                          FlashsciStream stream) {
  return flashsci::sm80::fwd::launch_any_forward<flashsci::Float16>(
      *params, static_cast<cudaStream_t>(stream));
}
