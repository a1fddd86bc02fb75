// bf16 instances of the sm90 backward, all head dimensions.
#include "../../core/dtype_bf16.cuh"
#include "../../ptx/wgmma.cuh"
#include "launch.cuh"

namespace {

struct Op : flashsci::BFloat16 {
  template <int kN>
  using Wgmma = flashsci::ptx::WgmmaBf16<kN>;

  static constexpr auto bias_gradient = flashsci_backward_sm80_bf16;
  static constexpr auto bias_gradient_workspace = flashsci_backward_sm80_bf16_workspace;
};

}  // namespace

extern "C" {
FLASHSCI_DECLARE_BACKWARD(sm90_bf16)
}

extern "C" int flashsci_backward_sm90_bf16(const FlashsciBackwardParams* params,
                                           FlashsciStream stream) {
  return flashsci::sm90::bwd::launch_backward<Op>(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_backward_sm90_bf16_workspace(const FlashsciBackwardParams* params) {
  return flashsci::sm90::bwd::backward_workspace<Op>(*params);
}
