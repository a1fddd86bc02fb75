// The forward and the backward of csrc/sm80 in fp32 as a library for the host.
#define SHARED_ALIGNMENT 128
#include "emulation.h"

// After what takes the place of csrc/ptx.
#include "sm80/bwd_fp32/fp32.cu"
#include "sm80/fwd_fp32/fp32.cu"

extern "C" {
int emulate_forward(const FlashsciForwardParams* params, int, int processors, unsigned seed,
                    char* text, int size) {
  return emulation::run(false, processors, seed, text, size,
                        [&](auto) { return flashsci_forward_sm80_fp32(params, nullptr); });
}
int emulate_backward(const FlashsciBackwardParams* params, int, int processors, unsigned seed,
                     char* text, int size) {
  return emulation::run(false, processors, seed, text, size,
                        [&](auto) { return flashsci_backward_sm80_fp32(params, nullptr); });
}
int64_t workspace(const FlashsciBackwardParams* params) {
  return flashsci_backward_sm80_fp32_workspace(params);
}
}
