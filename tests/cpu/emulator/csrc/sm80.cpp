// The forward and the backward of csrc/sm80 in 16 bits as a library for the host.
#define SHARED_ALIGNMENT 128
#include "emulation.h"

// After what takes the place of csrc/ptx.
#include "sm80/bwd/launch.cuh"
#include "sm80/fwd/bias_mask_launch.cuh"

extern "C" {
int emulate_forward(const FlashsciForwardParams* params, int bf16, int processors, unsigned seed,
                    char* text, int size) {
  return emulation::run(bf16 != 0, processors, seed, text, size, [&](auto op) {
    return flashsci::sm80::fwd::launch_any_forward<decltype(op)>(*params, nullptr);
  });
}
int emulate_backward(const FlashsciBackwardParams* params, int bf16, int processors, unsigned seed,
                     char* text, int size) {
  return emulation::run(bf16 != 0, processors, seed, text, size, [&](auto op) {
    return flashsci::sm80::bwd::launch_backward<decltype(op)>(*params, nullptr);
  });
}
int64_t workspace(const FlashsciBackwardParams* params) {
  return flashsci::sm80::bwd::backward_workspace(*params);
}
}
