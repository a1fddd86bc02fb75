// The form in which dropout comes to the kernels of csrc/sm80: an argument after the parameters.
#ifndef FLASHSCI_DROPOUT_H_
#define FLASHSCI_DROPOUT_H_

#include "flashsci.h"

#ifdef __cplusplus
extern "C" {
#endif

// Probabilities are dropped after the softmax: P of query i and key j is kept, and multiplied by
// keep_scale, if its 16 bits of Philox4x32-7 are at least `threshold`: of word j % 8 / 2 the low half
// for even j, the high half for odd j. The key is seed[0], the counter (seed[1], b * heads_q + h, i,
// j / 8) in 32 bits each, where b is the index of the batch entry or of the packed sequence.
// flashsci.dropout_mask gives the same mask.
typedef struct FlashsciDropout {
  const int64_t* seed;  // [2] on the device
  uint32_t threshold;   // min(round(p * 2^16), 2^16 - 1)
  float keep_scale;     // 1 / (1 - p)
} FlashsciDropout;

// D and Dv of calls with dropout; launchers return cudaErrorNotSupported for larger ones.
#define FLASHSCI_MAX_DROPOUT_HEAD_DIM 128

// Launchers for calls with dropout.
#define FLASHSCI_DECLARE_DROPOUT(dtype)                                                            \
  FLASHSCI_API int flashsci_forward_dropout_##dtype(                                               \
      const FlashsciForwardParams* params, const FlashsciDropout* dropout, FlashsciStream stream); \
  FLASHSCI_API int flashsci_backward_dropout_##dtype(const FlashsciBackwardParams* params,         \
                                                     const FlashsciDropout* dropout,               \
                                                     FlashsciStream stream);                       \
  FLASHSCI_API int64_t flashsci_backward_dropout_##dtype##_workspace(                              \
      const FlashsciBackwardParams* params);

FLASHSCI_DECLARE_DROPOUT(fp16)
FLASHSCI_DECLARE_DROPOUT(bf16)

#ifdef __cplusplus
}
#endif

#endif  // FLASHSCI_DROPOUT_H_
