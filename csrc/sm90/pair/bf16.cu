// bf16 instances of attention with a bias whose heads are neighbours in memory.
#include "../../core/dtype_bf16.cuh"
#include "../../ptx/mma.cuh"
#include "half/launch.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#error "units of sm90 are built for compute capability 9.0 only"
#endif

namespace flashsci::sm90::pair::half {

struct Bf16 : BFloat16 {
  static __device__ __forceinline__ void mma_eight(float (&c)[4], const uint32_t (&a)[2],
                                                   uint32_t b) {
    ptx::mma_m16n8k8_bf16(c, a[0], a[1], b);
  }
};

}  // namespace flashsci::sm90::pair::half

namespace half = flashsci::sm90::pair::half;

extern "C" int flashsci_forward_pair_bf16(const FlashsciForwardParams* params,
                                          FlashsciStream stream) {
  return half::launch_forward<half::Bf16>(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int flashsci_backward_pair_bf16(const FlashsciBackwardParams* params,
                                           FlashsciStream stream) {
  return half::launch_backward<half::Bf16>(*params, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t flashsci_backward_pair_bf16_workspace(const FlashsciBackwardParams* params) {
  return flashsci::sm90::pair::backward_workspace(*params);
}

extern "C" int flashsci_takes_pair_bf16(const FlashsciForwardParams* params) {
  return half::takes(*params);
}
