// The C boundary of csrc/sm80/small: attention of short sequences.
#ifndef FLASHSCI_SMALL_H_
#define FLASHSCI_SMALL_H_

#include "flashsci.h"

#ifdef __cplusplus
extern "C" {
#endif

// A value of `bias_is_fp32` for the fp32 unit: `bias` holds weights of keys (>= 0, the same for all
// queries, row stride 0) instead of biases, and `dbias` is their gradient. lse is log(sum of w
// e^S).
#define FLASHSCI_KEY_WEIGHTS 2

FLASHSCI_DECLARE_FORWARD(small_fp16)
FLASHSCI_DECLARE_FORWARD(small_bf16)
FLASHSCI_DECLARE_FORWARD(small_fp32)
FLASHSCI_DECLARE_BACKWARD(small_fp16)
FLASHSCI_DECLARE_BACKWARD(small_bf16)
FLASHSCI_DECLARE_BACKWARD(small_fp32)

#ifdef __cplusplus
}
#endif

#endif  // FLASHSCI_SMALL_H_
