// The forward of triangle attention, csrc/sm90/triangle_fwd, as a library for the host.
#include "emulation.h"

// After what takes the place of csrc/ptx.
#include "sm90/triangle_fwd/launch.cuh"

using namespace flashsci::sm90::triangle_fwd;

extern "C" {
int emulate(const FlashsciForwardParams* params, int bf16, int processors, unsigned seed,
            char* text, int size) {
  return emulation::run(bf16 != 0, processors, seed, text, size,
                        [&](auto op) { return launch<decltype(op)>(*params, nullptr); });
}
// A bias of 16 bits in the form that launch does not choose.
int emulate_other(const FlashsciForwardParams* params, int bf16, int processors, unsigned seed,
                  char* text, int size) {
  return emulation::run(bf16 != 0, processors, seed, text, size, [&](auto op) {
    return launch_tiling<decltype(op), Tiling<2, 6 - kMembersOf16Bits>>(*params, nullptr);
  });
}
}
