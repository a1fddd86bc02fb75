// Calls with key weights, which are fp32, of all dtypes.
#include "../../include/flashsci_weights.h"

#include "launch.cuh"

#define FLASHSCI_WEIGHTS(dtype)                                                                 \
  extern "C" int flashsci_forward_weights_##dtype(const FlashsciForwardParams* params,          \
                                                  FlashsciStream stream) {                      \
    return flashsci::sm80::weights::launch_forward(*params, flashsci_forward_sm80_##dtype,      \
                                                   stream);                                     \
  }                                                                                             \
  extern "C" int64_t flashsci_forward_weights_##dtype##_workspace(                              \
      const FlashsciForwardParams* params) {                                                    \
    return flashsci::sm80::weights::forward_workspace(*params);                                 \
  }                                                                                             \
  extern "C" int flashsci_backward_weights_##dtype(const FlashsciBackwardParams* params,        \
                                                   FlashsciStream stream) {                     \
    return flashsci::sm80::weights::launch_backward(                                            \
        *params, {flashsci_backward_sm80_##dtype, flashsci_backward_sm80_##dtype##_workspace},  \
        stream);                                                                                \
  }                                                                                             \
  extern "C" int64_t flashsci_backward_weights_##dtype##_workspace(                             \
      const FlashsciBackwardParams* params) {                                                   \
    return flashsci::sm80::weights::backward_workspace(                                         \
        *params, {flashsci_backward_sm80_##dtype, flashsci_backward_sm80_##dtype##_workspace}); \
  }

FLASHSCI_WEIGHTS(fp16)
FLASHSCI_WEIGHTS(bf16)
FLASHSCI_WEIGHTS(fp32)
