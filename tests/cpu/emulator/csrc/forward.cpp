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
// Whether a call of at most 64 head dims is for the wide tiles.
int is_wide(const FlashsciForwardParams* params, int processors) {
  using namespace flashsci::sm90::fwd;
  using Of64 = Tiles<64>;
  emulation::processors = processors;
  return suits_wide_tiles<Of64::Plain, Of64::Wide>(*params);
}
int64_t workspace(const FlashsciForwardParams* params, int processors) {
  emulation::processors = processors;
  return flashsci::sm90::fwd::forward_workspace(*params);
}
}
