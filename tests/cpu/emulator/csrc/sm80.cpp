// The forward and the backward of csrc/sm80 in 16 bits as a library for the host.
#define SHARED_ALIGNMENT 128
#include "emulation.h"

// After what takes the place of csrc/ptx.
#include "sm80/bwd/launch.cuh"
#include "sm80/fwd/bias_mask_launch.cuh"
#include "sm80/weights/launch.cuh"

namespace weights = flashsci::sm80::weights;

namespace {
template <class Op>
int forward(const FlashsciForwardParams* params, FlashsciStream) {
  return flashsci::sm80::fwd::launch_any_forward<Op>(*params, nullptr);
}
template <class Op>
int backward(const FlashsciBackwardParams* params, FlashsciStream) {
  return flashsci::sm80::bwd::launch_backward<Op>(*params, nullptr);
}
int64_t backward_workspace(const FlashsciBackwardParams* params) {
  return flashsci::sm80::bwd::backward_workspace(*params);
}
}  // namespace

extern "C" {
int emulate_forward(const FlashsciForwardParams* params, int bf16, int processors, unsigned seed,
                    char* text, int size) {
  return emulation::run(bf16 != 0, processors, seed, text, size, [&](auto op) {
    return weights::has_weights(*params)
               ? weights::launch_forward(*params, forward<decltype(op)>, nullptr)
               : forward<decltype(op)>(params, nullptr);
  });
}
int emulate_backward(const FlashsciBackwardParams* params, int bf16, int processors, unsigned seed,
                     char* text, int size) {
  return emulation::run(bf16 != 0, processors, seed, text, size, [&](auto op) {
    return weights::has_weights(*params)
               ? weights::launch_backward(*params, {backward<decltype(op)>, backward_workspace},
                                          nullptr)
               : backward<decltype(op)>(params, nullptr);
  });
}
int64_t forward_workspace(const FlashsciForwardParams* params) {
  return weights::forward_workspace(*params);
}
int64_t workspace(const FlashsciBackwardParams* params) {
  return weights::has_weights(*params)
             ? weights::backward_workspace(*params, {nullptr, backward_workspace})
             : backward_workspace(params);
}
}
