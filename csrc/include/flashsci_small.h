// The C boundary of csrc/sm80/small: attention of short sequences.
#ifndef FLASHSCI_SMALL_H_
#define FLASHSCI_SMALL_H_

#include "flashsci.h"

#ifdef __cplusplus
extern "C" {
#endif

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
