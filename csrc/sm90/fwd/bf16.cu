// bf16 instances of the sm90 forward, all head dimensions.
#include "../../core/dtype_bf16.cuh"
#include "../../ptx/wgmma.cuh"
#include "launch.cuh"

namespace {

struct Op : flashsci::BFloat16 {
  template <int kN>
  using Wgmma = flashsci::ptx::WgmmaBf16<kN>;
};

}  // namespace

extern "C" int flashsci_forward_sm90_bf16(const FlashsciForwardParams* params,
                                          FlashsciStream stream) {
  return flashsci::sm90::fwd::launch_forward<Op>(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_forward_sm90_bf16_workspace(const FlashsciForwardParams* params) {
  return flashsci::sm90::fwd::forward_workspace(*params);
}
