// bf16 instances of paged attention on sm90, all head dimensions.
#include "../../core/dtype_bf16.cuh"
#include "launch.cuh"

namespace {

struct Op : flashsci::BFloat16 {
  static constexpr bool kIsBf16 = true;
};

}  // namespace

extern "C" int flashsci_paged_sm90_bf16(const FlashsciPagedParams* params, FlashsciStream stream) {
  return flashsci::sm90::paged::launch<Op>(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_paged_sm90_bf16_workspace(const FlashsciPagedParams* params) {
  return flashsci::sm90::paged::workspace_bytes(*params, 2);
}
