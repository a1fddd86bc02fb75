// The forward and the backward of csrc/sm80 in fp32 as a library for the host.
#define SHARED_ALIGNMENT 128
#include "emulation.h"

// After what takes the place of csrc/ptx.
#include "sm80/bwd_fp32/fp32.cu"
#include "sm80/fwd_fp32/fp32.cu"
#include "sm80/weights/launch.cuh"

namespace weights = flashsci::sm80::weights;

namespace {
constexpr weights::Backward kBackward{flashsci_backward_sm80_fp32,
                                      flashsci_backward_sm80_fp32_workspace};
}

extern "C" {
int emulate_forward(const FlashsciForwardParams* params, int, int processors, unsigned seed,
                    char* text, int size) {
  return emulation::run(false, processors, seed, text, size, [&](auto) {
    return weights::has_weights(*params)
               ? weights::launch_forward(*params, flashsci_forward_sm80_fp32, nullptr)
               : flashsci_forward_sm80_fp32(params, nullptr);
  });
}
int emulate_backward(const FlashsciBackwardParams* params, int, int processors, unsigned seed,
                     char* text, int size) {
  return emulation::run(false, processors, seed, text, size, [&](auto) {
    return weights::has_weights(*params) ? weights::launch_backward(*params, kBackward, nullptr)
                                         : flashsci_backward_sm80_fp32(params, nullptr);
  });
}
int64_t forward_workspace(const FlashsciForwardParams* params) {
  return weights::forward_workspace(*params);
}
int64_t workspace(const FlashsciBackwardParams* params) {
  return weights::has_weights(*params) ? weights::backward_workspace(*params, kBackward)
                                       : flashsci_backward_sm80_fp32_workspace(params);
}
}
