// The forward and the backward of csrc/sm80 in 16 bits with dropout as a library for the host.
#define SHARED_ALIGNMENT 128
#include "emulation.h"

// After what takes the place of csrc/ptx.
#include "sm80/dropout/launch.cuh"

namespace {
FlashsciDropout given;  // of the next calls
}

extern "C" {
void drop(const FlashsciDropout* dropout) { given = *dropout; }

int emulate_forward(const FlashsciForwardParams* params, int bf16, int processors, unsigned seed,
                    char* text, int size) {
  return emulation::run(bf16 != 0, processors, seed, text, size, [&](auto op) {
    return flashsci::sm80::dropout::launch_forward<decltype(op)>(*params, given, nullptr);
  });
}
int emulate_backward(const FlashsciBackwardParams* params, int bf16, int processors, unsigned seed,
                     char* text, int size) {
  return emulation::run(bf16 != 0, processors, seed, text, size, [&](auto op) {
    return flashsci::sm80::dropout::launch_backward<decltype(op)>(*params, given, nullptr);
  });
}
int64_t workspace(const FlashsciBackwardParams* params) {
  return flashsci::sm80::dropout::backward_workspace(*params);
}
}
