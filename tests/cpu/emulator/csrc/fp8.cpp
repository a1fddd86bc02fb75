// Attention on 8-bit floats, csrc/sm90/fp8, as a library for the host.
#include <climits>

#include "emulation.h"

// After what takes the place of csrc/ptx.
#include "sm90/fp8/launch.cuh"

extern "C" int emulate(const FlashsciFp8ForwardParams* params, int, int processors, unsigned seed,
                       char* text, int size) {
  flashsci::ptx::most_products = params->fast ? INT_MAX : 128;
  return emulation::run(true, processors, seed, text, size, [&](auto) {
    return flashsci::sm90::fp8::launch_forward(*params, nullptr);
  });
}

// Query rows of the tiles of a call.
extern "C" int tile_rows(const FlashsciFp8ForwardParams* params, int processors) {
  emulation::processors = processors;
  return flashsci::sm90::fp8::with_tiles(*params,
                                         [](auto tiles) { return int{decltype(tiles)::kBlockQ}; });
}

// Whether its sums of the tensor core run over all keys.
extern "C" bool has_fast_tiles(const FlashsciFp8ForwardParams* params) {
  return flashsci::sm90::fp8::with_tiles(*params,
                                         [](auto tiles) { return decltype(tiles)::kFast; });
}

extern "C" int64_t workspace(const FlashsciFp8ForwardParams* params, int processors) {
  emulation::processors = processors;
  return flashsci::sm90::fp8::forward_workspace(*params);
}
