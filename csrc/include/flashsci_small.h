// The C boundary of csrc/sm80/small: attention of short sequences.
#ifndef FLASHSCI_SMALL_H_
#define FLASHSCI_SMALL_H_

#include "flashsci.h"

#ifdef __cplusplus
extern "C" {
#endif

// As `bias_is_fp32`, of the fp32 unit: what `bias` has are no biases but weights of keys, >= 0, the same for all queries
// (no stride of rows); `dbias` is their gradient. lse is log(sum of w e^S).
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
