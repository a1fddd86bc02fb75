// Attention of short sequences, csrc/sm80/small, as a library for the host.
#include "emulation.h"

// After what takes the place of csrc/ptx.
#include "sm80/small/launch.cuh"

using namespace flashsci::sm80::small;

extern "C" {
// Bytes of the last launch: none of a kernel whose rows do not go through shared memory.
int shared_bytes() { return emulation::launched_shared; }
// bf16: of 16 bits; 2: fp32.
int emulate_forward(const FlashsciForwardParams* params, int dtype, int processors, unsigned seed,
                    char* text, int size) {
  return emulation::run(dtype == 1, processors, seed, text, size, [&](auto op) {
    return dtype == 2 ? launch_forward<Products32>(*params, nullptr)
                      : launch_forward<Products16<decltype(op)>>(*params, nullptr);
  });
}
int emulate_backward(const FlashsciBackwardParams* params, int dtype, int processors, unsigned seed,
                     char* text, int size) {
  return emulation::run(dtype == 1, processors, seed, text, size, [&](auto op) {
    return dtype == 2 ? launch_backward<Products32>(*params, nullptr)
                      : launch_backward<Products16<decltype(op)>>(*params, nullptr);
  });
}
}
