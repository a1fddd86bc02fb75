// fp16 instances of paged attention from 8-bit caches on sm90, all head dimensions.
#include "../../core/dtype_f16.cuh"
#include "../paged/launch.cuh"

namespace {

using flashsci::sm90::paged::Generation;

// Profilers tell this unit's kernels from those of paged by this name.
struct Op8 : flashsci::Float16 {};

}  // namespace

extern "C" int flashsci_paged8_sm90_fp16(const FlashsciPaged8Params* params,
                                         FlashsciStream stream) {
  return flashsci::paged::launch8<Generation, Op8>(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_paged8_sm90_fp16_workspace(const FlashsciPaged8Params* params) {
  return flashsci::paged::workspace_bytes<Generation>(params->call, 1);
}
