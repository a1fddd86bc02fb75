// The workspace of forwards with key weights (flashsci_small.h says how those are given): their
// logarithms. Other calls of the same launchers need none.
#ifndef FLASHSCI_WEIGHTS_H_
#define FLASHSCI_WEIGHTS_H_

#include "flashsci.h"

#ifdef __cplusplus
extern "C" {
#endif

FLASHSCI_DECLARE_FORWARD_WORKSPACE(sm80_fp16)
FLASHSCI_DECLARE_FORWARD_WORKSPACE(sm80_bf16)
FLASHSCI_DECLARE_FORWARD_WORKSPACE(sm80_fp32)

#ifdef __cplusplus
}
#endif

#endif  // FLASHSCI_WEIGHTS_H_
