// Paged attention, csrc/sm90/paged, as a library for the host.
#include "emulation.h"

// After what takes the place of csrc/ptx.
#include "sm90/paged/launch.cuh"

using namespace flashsci::sm90::paged;

extern "C" {
int emulate(const FlashsciPagedParams* params, int bf16, int processors, unsigned seed, char* text,
            int size) {
  return emulation::run(bf16 != 0, processors, seed, text, size,
                        [&](auto op) { return launch<decltype(op)>(*params, nullptr); });
}
int64_t workspace(const FlashsciPagedParams* params, int processors) {
  emulation::processors = processors;
  return workspace_of(*params, 2);
}
}
