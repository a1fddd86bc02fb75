// Paged attention from 8-bit caches, csrc/sm90/paged or, with SM80, csrc/sm80/paged, as a library for the host.
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
int emulate(const FlashsciPaged8Params* params, int bf16, int processors, unsigned seed, char* text,
            int size) {
  emulation::shared_room = kRooms[seed % 3] << 10;
  return emulation::run(bf16 != 0, processors, seed, text, size, [&](auto op) {
    return launch8<Generation, decltype(op)>(*params, nullptr);
  });
}
int64_t workspace(const FlashsciPaged8Params* params, int processors) {
  emulation::processors = processors;
  return workspace_bytes<Generation>(params->call, 1);
}
#ifdef SM80
// Four bytes as fp16, in units of what is returned.
float widen(uint32_t word, int e5m2, uint32_t* wide) {
  const uint2 found = e5m2 ? f16x4_of_e5m2(word) : f16x4_of_e4m3(word);
  wide[0] = found.x, wide[1] = found.y;
  return e5m2 ? E5m2::kUnit : E4m3::kUnit;
}
#endif
}
