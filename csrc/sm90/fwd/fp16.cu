// fp16 instances of the sm90 forward, all head dimensions.
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
};

}  // namespace

extern "C" int flashsci_forward_sm90_fp16(const FlashsciForwardParams* params,
                                          FlashsciStream stream) {
  return flashsci::sm90::fwd::launch_forward<Op>(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_forward_sm90_fp16_workspace(const FlashsciForwardParams* params) {
  return flashsci::sm90::fwd::forward_workspace(*params);
}
