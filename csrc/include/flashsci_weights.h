// The C boundary of csrc/sm80/weights: dense calls with key weights (flashsci_small.h says how those
// are given), served by the kernels of flashsci_..._sm80_... with a bias. Other calls:
// cudaErrorNotSupported.
#ifndef FLASHSCI_WEIGHTS_H_
#define FLASHSCI_WEIGHTS_H_

#include "flashsci.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FLASHSCI_DECLARE_WEIGHTS(dtype)               \
  FLASHSCI_DECLARE_FORWARD(weights_##dtype)           \
  FLASHSCI_DECLARE_FORWARD_WORKSPACE(weights_##dtype) \
  FLASHSCI_DECLARE_BACKWARD(weights_##dtype)

FLASHSCI_DECLARE_WEIGHTS(fp16)
FLASHSCI_DECLARE_WEIGHTS(bf16)
FLASHSCI_DECLARE_WEIGHTS(fp32)

#ifdef __cplusplus
}
#endif

#endif  // FLASHSCI_WEIGHTS_H_
