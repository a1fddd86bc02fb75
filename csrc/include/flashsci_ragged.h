// The form in which the bias of a packed call comes to the kernels of csrc/sm80.
#ifndef FLASHSCI_RAGGED_H_
#define FLASHSCI_RAGGED_H_

// A packed call (cu_seqlens_q != NULL) with a bias has no mask, so that the strides of the mask are
// free. In FlashsciBiasMask:
//   bias_strides.head    from head to head; 0: heads share the bias
//   bias_strides.column  1: keys are neighbours
//   bias_strides.batch0, bias_strides.batch1, bias_strides.row  0
// A bias per pair holds one row-major block [Sq, Sk] for each sequence:
//   mask_strides.batch0  the address of the starts of the blocks, int64 [num_seqs + 1]
//   mask_strides.batch1  the number of pairs; a block that would leave them is not read, and its
//                        sequence is computed as one without keys
// A bias per key holds a number for each packed row of k:
//   mask_strides.batch0, mask_strides.batch1  0
// dbias has blocks at the same places, dbias_strides as those of a bias per pair. It needs a number
// for every pair and head, and no softcap below the bias; otherwise launchers return
// cudaErrorNotSupported.

#endif  // FLASHSCI_RAGGED_H_
