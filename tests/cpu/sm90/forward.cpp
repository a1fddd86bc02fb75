// The forward of csrc/sm90 in bf16 as a library for the host.
#include "emulation.h"

// After what takes the place of csrc/ptx.
#include "sm90/fwd/launch.cuh"

extern "C" {
int emulate(const FlashsciForwardParams* params, int, int processors, unsigned seed, char* text,
            int size) {
  return emulation::run(true, processors, seed, text, size, [&](auto) {
    return flashsci::sm90::fwd::launch_forward<emulation::Bf16>(*params, nullptr);
  });
}
int64_t workspace(const FlashsciForwardParams* params, int processors) {
  emulation::processors = processors;
  return flashsci::sm90::fwd::forward_workspace(*params);
}
}
