// fp16 instances of the sm80 backward, all head dimensions.
#include "../../core/dtype_f16.cuh"
#include "launch.cuh"

extern "C" int flashsci_backward_sm80_fp16(const FlashsciBackwardParams* params,
                                           FlashsciStream stream) {
  return flashsci::sm80::bwd::launch_backward<flashsci::Float16>(*params,
                                                                 static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_backward_sm80_fp16_workspace(const FlashsciBackwardParams* params) {
  return flashsci::sm80::bwd::backward_workspace(*params);
}
