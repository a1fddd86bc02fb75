// The form in which ALiBi comes to the kernels of csrc/sm80: in the place of a bias.
#ifndef FLASHSCI_ALIBI_H_
#define FLASHSCI_ALIBI_H_

// A value of `bias_is_fp32` in FlashsciBiasMask: `bias` holds a slope for each head (fp32; strides
// row and column 0). The score of query i and key j gets the addend -slope |i + shift - j|, where
// shift is Sk - Sq with lower_right, else 0. Packed calls, too: batch0 is the stride of sequences.
// Its gradient comes as sums over keys: dbias, where not NULL, is fp32 [B0, B1, Hq, Sq], contiguous.
// The sum of a head's rows is the gradient of its slope.
#define FLASHSCI_ALIBI_SLOPES 3

#endif  // FLASHSCI_ALIBI_H_
