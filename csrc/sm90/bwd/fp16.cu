// fp16 instances of the sm90 backward, all head dimensions.
#include "../../core/dtype_f16.cuh"
#include "../../ptx/wgmma.cuh"
#include "launch.cuh"

#if defined(__CUDA_BF16_H__) || defined(BFLOAT16)
#error "the fp16 unit must not see cuda_bf16.h"
#endif
namespace {

struct Op : flashsci::Float16 {
  template <int kN>
  using Wgmma = flashsci::ptx::WgmmaF16<kN>;

  static constexpr auto bias_gradient = flashsci_backward_sm80_fp16;
  static constexpr auto bias_gradient_workspace = flashsci_backward_sm80_fp16_workspace;
};

}  // namespace

extern "C" {
FLASHSCI_DECLARE_BACKWARD(sm90_fp16)
}

extern "C" int flashsci_backward_sm90_fp16(const FlashsciBackwardParams* params,
                                           FlashsciStream stream) {
  return flashsci::sm90::bwd::launch_backward<Op>(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_backward_sm90_fp16_workspace(const FlashsciBackwardParams* params) {
  return flashsci::sm90::bwd::backward_workspace<Op>(*params);
}
