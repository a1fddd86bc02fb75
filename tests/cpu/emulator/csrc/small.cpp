// Attention of short sequences, csrc/sm80/small, as a library for the host.
#include "emulation.h"

// After what takes the place of csrc/ptx.
#include "sm80/small/launch.cuh"

using namespace flashsci::sm80::small;

namespace {

// As csrc/sm80/small/fp32.cu does.
cudaError_t forward_fp32(const FlashsciForwardParams& p) {
  return is_weighted(p) ? launch_forward<WeightedProducts32>(p, nullptr)
                        : launch_forward<Products32>(p, nullptr);
}
cudaError_t backward_fp32(const FlashsciBackwardParams& p) {
  return is_weighted(p) ? launch_backward<WeightedProducts32>(p, nullptr)
                        : launch_backward<Products32>(p, nullptr);
}

}  // namespace

extern "C" {
// Bytes of the last launch: none of a kernel whose rows do not go through shared memory.
int shared_bytes() { return emulation::launched_shared; }
// Whether kernels multiply steps of these strides.
bool steps_fit(const FlashsciStrides* strides, int size) { return Steps::fit(*strides, size); }
// bf16: of 16 bits; 2: fp32.
int emulate_forward(const FlashsciForwardParams* params, int dtype, int processors, unsigned seed,
                    char* text, int size) {
  return emulation::run(dtype == 1, processors, seed, text, size, [&](auto op) {
    return dtype == 2 ? forward_fp32(*params)
                      : launch_forward<Products16<decltype(op)>>(*params, nullptr);
  });
}
int emulate_backward(const FlashsciBackwardParams* params, int dtype, int processors, unsigned seed,
                     char* text, int size) {
  return emulation::run(dtype == 1, processors, seed, text, size, [&](auto op) {
    return dtype == 2 ? backward_fp32(*params)
                      : launch_backward<Products16<decltype(op)>>(*params, nullptr);
  });
}
}
