// The C boundary of csrc/sm90/pair: attention with a bias whose heads lie side by side in memory.
#ifndef FLASHSCI_PAIR_H_
#define FLASHSCI_PAIR_H_

#include "flashsci.h"

#ifdef __cplusplus
extern "C" {
#endif

// Who takes a call with its bias as it lies in memory: nobody, the forward, or the backward too,
// whose dbias has strides in the order of the bias then.
enum { FLASHSCI_COPIED = 0, FLASHSCI_FORWARD_AS_GIVEN = 1, FLASHSCI_AS_GIVEN = 2 };
#define FLASHSCI_DECLARE_PAIR(unit) \
  FLASHSCI_DECLARE_FORWARD(unit)    \
  FLASHSCI_API int flashsci_takes_##unit(const FlashsciForwardParams* params);

FLASHSCI_DECLARE_PAIR(pair_fp16)
FLASHSCI_DECLARE_PAIR(pair_bf16)
FLASHSCI_DECLARE_PAIR(pair_fp32)
FLASHSCI_DECLARE_BACKWARD(pair_fp32)

#ifdef __cplusplus
}
#endif

#endif  // FLASHSCI_PAIR_H_
