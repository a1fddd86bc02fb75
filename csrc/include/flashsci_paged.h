/* Paged attention: keys and values in the pages of a cache. The C interface, beside flashsci.h. */
#ifndef FLASHSCI_PAGED_H_
#define FLASHSCI_PAGED_H_

#include "flashsci.h"

#ifdef __cplusplus
extern "C" {
#endif

// out = softmax(scale * q k^T, softcapped, masked) v for packed queries; causal and windows are
// aligned lower right. Block tables, lengths and offsets are untrusted data: values out of range
// are clamped, and nothing is read beyond a tensor.
typedef struct FlashsciPagedParams {
  const void* q;                // [T, Hq, D]
  const void* k_cache;          // [pages, page, Hk, D]
  const void* v_cache;          // [pages, page, Hk, Dv]
  void* out;                    // [T, Hq, Dv]
  float* lse;                   // [Hq, T], contiguous, or NULL: not wanted
  const int32_t* block_table;   // [N, columns]
  const int32_t* seqused_k;     // [N]: keys of each sequence
  const int32_t* cu_seqlens_q;  // [N + 1]
  const float* sink;            // [Hq]: one more logit in each head's softmax, or NULL
  int64_t q_row, q_head, out_row, out_head;
  int64_t k_page, k_row, k_head, v_page, v_row, v_head;
  int32_t tokens, sequences, heads_q, heads_k;
  int32_t pages, page, columns;
  int32_t head_dim, head_dim_v;
  float scale, softcap;               // softcap 0 = none
  int32_t window_left, window_right;  // -1 = unbounded
  int32_t device;                     // index of the device the pointers live on
  void* workspace;  // ..._workspace(params) bytes, aligned to 256, with any contents
} FlashsciPagedParams;

// The same from caches of 8-bit floats. K and V are the caches times their scales.
typedef struct FlashsciPaged8Params {
  FlashsciPagedParams call;
  const float* k_scale;  // [N, Hk], or NULL: 1
  const float* v_scale;
  int64_t k_scale_sequence, k_scale_head, v_scale_sequence, v_scale_head;  // strides
  int32_t e5m2;                                                            // 0: e4m3fn
} FlashsciPaged8Params;

// cudaErrorNotSupported: these kernels do not take such strides, alignment or sizes, and have
// launched nothing. The workspace depends on sizes alone.
#define FLASHSCI_DECLARE_PAGED(unit, Params)                                     \
  FLASHSCI_API int flashsci_##unit(const Params* params, FlashsciStream stream); \
  FLASHSCI_API int64_t flashsci_##unit##_workspace(const Params* params);

FLASHSCI_DECLARE_PAGED(paged_sm90_fp16, FlashsciPagedParams)
FLASHSCI_DECLARE_PAGED(paged_sm90_bf16, FlashsciPagedParams)
FLASHSCI_DECLARE_PAGED(paged8_sm90_fp16, FlashsciPaged8Params)
FLASHSCI_DECLARE_PAGED(paged8_sm90_bf16, FlashsciPaged8Params)
FLASHSCI_DECLARE_PAGED(paged_sm80_fp16, FlashsciPagedParams)
FLASHSCI_DECLARE_PAGED(paged_sm80_bf16, FlashsciPagedParams)
FLASHSCI_DECLARE_PAGED(paged8_sm80_fp16, FlashsciPaged8Params)
FLASHSCI_DECLARE_PAGED(paged8_sm80_bf16, FlashsciPaged8Params)

#ifdef __cplusplus
}
#endif

#endif  // FLASHSCI_PAGED_H_
