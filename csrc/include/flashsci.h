// The whole C boundary of the kernels: plain parameter structs and extern "C" launchers.
//
// No torch, no CUDA types: what a launcher needs is pointers, sizes and element strides. A launcher
// returns a cudaError_t as int, never allocates, prints, synchronises or exits, and launches on the
// caller's current device.
#ifndef FLASHSCI_H_
#define FLASHSCI_H_

#include <stdint.h>

#if defined(__GNUC__)
#define FLASHSCI_API __attribute__((visibility("default")))
#else
#define FLASHSCI_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Element strides of a [B0, B1, H, S, D] tensor whose last dimension is contiguous; 0 = broadcast.
typedef struct FlashsciStrides {
  int64_t batch0, batch1, head, row;
} FlashsciStrides;

// out = softmax(scale * q k^T, softcapped, masked by the window) v, lse = log of its denominator.
// Dense: q [B0, B1, Hq, Sq, D], k [B0, B1, Hk, Sk, D], v [B0, B1, Hk, Sk, Dv].
// Packed (cu_seqlens_q != NULL): q [Hq, Tq, D], k [Hk, Tk, D], v [Hk, Tk, Dv]; batch0 = batch1 = 1;
// seq_q = Tq, seq_k = Tk; sequence n owns rows cu_seqlens[n] .. cu_seqlens[n + 1].
typedef struct FlashsciForwardParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;                    // [B0, B1, Hq, Sq, Dv], strides out_strides
  float* lse;                   // [B0, B1, Hq, Sq], contiguous
  const int32_t* cu_seqlens_q;  // [num_seqs + 1] on the device, or NULL
  const int32_t* cu_seqlens_k;  // [num_seqs + 1] on the device, or NULL
  FlashsciStrides q_strides, k_strides, v_strides, out_strides;
  int64_t batch0, batch1;
  int32_t heads_q, heads_k;  // heads_q is a multiple of heads_k
  int32_t seq_q, seq_k;      // at most FLASHSCI_MAX_SEQ
  int32_t num_seqs;
  int32_t max_seqlen_q;  // a hint for the tile choice, -1 unknown; packed only
  int32_t head_dim, head_dim_v;
  float scale, softcap;               // softcap 0 = none
  int32_t window_left, window_right;  // -1 = unbounded
  int32_t lower_right;                // the diagonal ends in the lower right corner, not upper left
  int32_t copy_bytes;                 // 16, 8, 4 or 2: what q, k, v rows are aligned to
  int32_t device;                     // index of the device the pointers live on
  int32_t shared_per_sm;              // bytes of shared memory that device has per SM
} FlashsciForwardParams;

// Row indices, their differences and sums with a window must fit 32 bits.
#define FLASHSCI_MAX_SEQ (1 << 29)
#define FLASHSCI_MAX_HEAD_DIM 256

typedef void* FlashsciStream;  // cudaStream_t

FLASHSCI_API int flashsci_forward_sm80_fp16(const FlashsciForwardParams* params,
                                            FlashsciStream stream);
FLASHSCI_API int flashsci_forward_sm80_bf16(const FlashsciForwardParams* params,
                                            FlashsciStream stream);
// cudaErrorNotSupported: nothing was launched, sm80 serves the call (strides, alignment, features).
FLASHSCI_API int flashsci_forward_sm90_fp16(const FlashsciForwardParams* params,
                                            FlashsciStream stream);
FLASHSCI_API int flashsci_forward_sm90_bf16(const FlashsciForwardParams* params,
                                            FlashsciStream stream);

// JSON: version, digests of the kernel units, architectures, tile preset, compiler.
FLASHSCI_API const char* flashsci_build_info(void);

// NULL, or why this library cannot run here: no driver, a driver older than the toolkit, no device.
FLASHSCI_API const char* flashsci_driver_problem(void);

#ifdef __cplusplus
}
#endif

#endif  // FLASHSCI_H_
