// bf16 instances of paged attention on sm80, all head dimensions.
#include "../../core/dtype_bf16.cuh"
#include "launch.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "bf16 units are built for compute capability 8.0 and newer only"
#endif
namespace {

using flashsci::sm80::paged::Generation;

// A type of this unit, so that its kernels are, too.
struct Op : flashsci::BFloat16 {};

}  // namespace

extern "C" int flashsci_paged_sm80_bf16(const FlashsciPagedParams* params, FlashsciStream stream) {
  return flashsci::paged::launch<Generation, Op>(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_paged_sm80_bf16_workspace(const FlashsciPagedParams* params) {
  return flashsci::paged::workspace_bytes<Generation>(*params, 2);
}
