// Paged attention, csrc/sm90/paged or, with SM80, csrc/sm80/paged, as a library for the host.
#include "emulation.h"

// After what takes the place of csrc/ptx.
#ifdef SM80
#include "sm80/paged/launch.cuh"
using namespace flashsci::sm80::paged;
constexpr int kRooms[] = {99, 163, 227};  // KiB of shared memory of devices
#else
#include "sm90/paged/launch.cuh"
using namespace flashsci::sm90::paged;
constexpr int kRooms[] = {227, 227, 227};
#endif

extern "C" {
int emulate(const FlashsciPagedParams* params, int bf16, int processors, unsigned seed, char* text,
            int size) {
  emulation::shared_room = kRooms[seed % 3] << 10;
  return emulation::run(bf16 != 0, processors, seed, text, size, [&](auto op) {
    return launch<Generation, decltype(op)>(*params, nullptr);
  });
}
#ifndef SM80
unsigned steps() { return steps_begun; }
#endif
int64_t workspace(const FlashsciPagedParams* params, int processors) {
  emulation::processors = processors;
  return workspace_bytes<Generation>(*params, 2);
}
}
