// The backward of csrc/sm90 as a library for the host, of one head dim: FLASHSCI_SM90_ONLY.
#define SHARED_ALIGNMENT 1024  // kernels with a bias count on it
#include "emulation.h"

// After what takes the place of csrc/ptx.
#include "sm90/bwd/launch.cuh"

namespace {

// The sum of a gradient of a bias over dims that the bias lacks is a kernel of csrc/sm80.
template <class Base>
struct Op : Base {
  static int bias_gradient(const FlashsciBackwardParams*, cudaStream_t) {
    return cudaErrorNotSupported;
  }
  static int64_t bias_gradient_workspace(const FlashsciBackwardParams*) { return 0; }
};

}  // namespace

extern "C" {
int64_t workspace(const FlashsciBackwardParams* params) {
  return flashsci::sm90::bwd::backward_workspace<Op<emulation::Bf16>>(*params);
}
int emulate(const FlashsciBackwardParams* params, int bf16, int processors, unsigned seed,
            char* text, int size) {
  emulation::any_order = params->deterministic == 0;
  emulation::together = seed % 3 == 0 ? 1 : 4;
  return emulation::run(bf16 != 0, processors, seed, text, size, [&](auto op) {
    return flashsci::sm90::bwd::launch_backward<Op<decltype(op)>>(*params, nullptr);
  });
}
}
