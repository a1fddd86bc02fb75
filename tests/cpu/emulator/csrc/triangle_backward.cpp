// The backward of triangle attention, csrc/sm90/triangle_bwd, as a library for the host.
#include "emulation.h"

// After what takes the place of csrc/ptx.
#include "sm90/triangle_bwd/launch.cuh"

extern "C" {
int64_t workspace(const FlashsciBackwardParams* params) {
  return flashsci::sm90::triangle_bwd::workspace(*params);
}
int emulate(const FlashsciBackwardParams* params, int bf16, int processors, unsigned seed,
            char* text, int size) {
  emulation::any_order = false;  // what is deterministic takes turns
  return emulation::run(bf16 != 0, processors, seed, text, size, [&](auto op) {
    return flashsci::sm90::triangle_bwd::launch<decltype(op)>(*params, nullptr);
  });
}
}
