// The C boundary of the forward on 8-bit floats (float8_e4m3fn); the rest is in flashsci.h.
#ifndef FLASHSCI_FP8_H_
#define FLASHSCI_FP8_H_

#include "flashsci.h"

#ifdef __cplusplus
extern "C" {
#endif

// The factors of a tensor's numbers: fp32, one for the tensor, for each head, or for each block of
// rows. The scale of row i of a sequence is data[batch0 * .. + batch1 * .. + head * head + n *
// sequence + ((i >> shift) + first_slot) * block], where first_slot is 0 or, with slots, (first_row
// >> shift) + n for sequence n, which begins at first_row.
typedef struct FlashsciScales {
  const float* data;                              // NULL: 1
  int64_t batch0, batch1, head, sequence, block;  // strides in elements
  int32_t shift;  // log2 of the rows of a block: 6, 7; or FLASHSCI_ONE_SCALE, no blocks
  int32_t slots;  // blocks of a packed tensor
} FlashsciScales;

#define FLASHSCI_ONE_SCALE 30

// q, k, v in e4m3; out in bf16 or fp16. `call` has no bias, no mask and the default precision; its
// lse is always written. fast: sums of the tensor cores may run over all keys and columns.
typedef struct FlashsciFp8ForwardParams {
  FlashsciForwardParams call;
  FlashsciScales q_scale, k_scale, v_scale;
  int32_t out_is_fp16, fast;
} FlashsciFp8ForwardParams;

FLASHSCI_API int flashsci_forward_sm90_e4m3(const FlashsciFp8ForwardParams* params,
                                            FlashsciStream stream);
FLASHSCI_API int64_t flashsci_forward_sm90_e4m3_workspace(const FlashsciFp8ForwardParams* params);

#ifdef __cplusplus
}
#endif

#endif  // FLASHSCI_FP8_H_
