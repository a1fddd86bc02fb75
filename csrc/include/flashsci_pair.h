// The C boundary of csrc/sm90/pair: attention with a bias whose heads are neighbours in memory.
#ifndef FLASHSCI_PAIR_H_
#define FLASHSCI_PAIR_H_

#include "flashsci.h"

#ifdef __cplusplus
extern "C" {
#endif

// The launchers of the forward and the backward; the strides of dbias are in the order of the bias.
FLASHSCI_DECLARE_FORWARD(pair_fp16)
FLASHSCI_DECLARE_FORWARD(pair_bf16)
FLASHSCI_DECLARE_FORWARD(pair_fp32)
FLASHSCI_DECLARE_BACKWARD(pair_fp16)
FLASHSCI_DECLARE_BACKWARD(pair_bf16)
FLASHSCI_DECLARE_BACKWARD(pair_fp32)
// Whether they take a call and its gradients with the bias as it is stored.
FLASHSCI_API int flashsci_takes_pair_fp16(const FlashsciForwardParams* params);
FLASHSCI_API int flashsci_takes_pair_bf16(const FlashsciForwardParams* params);
FLASHSCI_API int flashsci_takes_pair_fp32(const FlashsciForwardParams* params);

// The kernels that take a bias whose keys are not neighbours in memory without a copy: none, the
// forward, or the backward too.
enum { FLASHSCI_COPIED = 0, FLASHSCI_FORWARD_AS_GIVEN = 1, FLASHSCI_AS_GIVEN = 2 };

#ifdef __cplusplus
}
#endif

#endif  // FLASHSCI_PAIR_H_
