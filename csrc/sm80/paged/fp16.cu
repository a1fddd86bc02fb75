// fp16 instances of paged attention on sm80, all head dimensions.
#include "../../core/dtype_f16.cuh"
#include "launch.cuh"

#if defined(__CUDA_BF16_H__) || defined(BFLOAT16)
#error "the fp16 unit must not see cuda_bf16.h"
#endif
namespace {

using flashsci::sm80::paged::Generation;

// A type of this unit, so that its kernels are, too.
struct Op : flashsci::Float16 {};

}  // namespace

extern "C" int flashsci_paged_sm80_fp16(const FlashsciPagedParams* params, FlashsciStream stream) {
  return flashsci::paged::launch<Generation, Op>(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_paged_sm80_fp16_workspace(const FlashsciPagedParams* params) {
  return flashsci::paged::workspace_bytes<Generation>(*params, 2);
}
