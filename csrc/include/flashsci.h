// The whole C boundary of the kernels: plain parameter structs and extern "C" launchers.
//
// The header needs neither torch nor CUDA types: a launcher takes pointers, sizes and element
// strides. A launcher returns a cudaError_t as int, never allocates, prints, synchronises or exits,
// and launches on the caller's current device.
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

// Element strides of a [B0, B1, Hq, Sq, Sk] tensor of any layout; 0 = broadcast.
typedef struct FlashsciScoreStrides {
  int64_t batch0, batch1, head, row, column;
} FlashsciScoreStrides;

// The two terms of each pair of a query and a key: an addend of its score (after softcap, unless
// `capped`, in units of the natural exponent; -inf hides the key), and a flag that says whether the
// query attends to the key.
typedef struct FlashsciBiasMask {
  const void* bias;     // [B0, B1, Hq, Sq, Sk] by bias_strides, fp32 or q's dtype; or NULL
  const uint8_t* mask;  // [B0, B1, Hq, Sq, Sk] by mask_strides, 0 = hidden; or NULL
  FlashsciScoreStrides bias_strides, mask_strides;
  int32_t bias_is_fp32;
  int32_t capped;  // there are a bias and a softcap, which bounds the sum: kernels of sm80 only
} FlashsciBiasMask;

// The accuracy of fp32 products: that of fp32 (three products of halves of the operands) or of TF32
// (one product). Ignored for other dtypes.
enum { FLASHSCI_TF32X3 = 0, FLASHSCI_TF32 = 1 };

// out = softmax(scale * q k^T, softcapped, + bias, masked) v, lse = log of its denominator.
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
  FlashsciBiasMask bias_mask;  // dense only
  int64_t batch0, batch1;
  int32_t heads_q, heads_k;  // heads_q is a multiple of heads_k
  int32_t seq_q, seq_k;      // at most FLASHSCI_MAX_SEQ
  int32_t num_seqs;
  int32_t max_seqlen_q;  // a hint for the tile choice, -1 unknown; packed only
  int32_t head_dim, head_dim_v;
  float scale, softcap;               // softcap 0 = none
  int32_t window_left, window_right;  // -1 = unbounded
  int32_t lower_right;                // the diagonal ends in the lower right corner, not upper left
  int32_t precision;                  // fp32 only: FLASHSCI_TF32X3 or FLASHSCI_TF32
  int32_t copy_bytes;                 // 16, 8, 4 or 2: alignment of the rows of q, k, v
  int32_t device;                     // index of the device the pointers live on
  int32_t shared_per_sm;              // bytes of shared memory that device has per SM
  void* workspace;  // ..._workspace(params) bytes, aligned to 256, with any contents; NULL: none
} FlashsciForwardParams;

// The gradients of sum(out * dout) + sum(lse * dlse), with P recomputed from the given lse. This
// lse may be larger than that of these keys, as for a block of a longer row; rows with lse = -inf
// give zeros. Shapes and packing are those of FlashsciForwardParams. A gradient whose pointer is
// NULL is not computed.
typedef struct FlashsciBackwardParams {
  const void* q;
  const void* k;
  const void* v;
  const void* out;
  const void* dout;             // shape of out, or NULL = zero
  const float* lse;             // [B0, B1, Hq, Sq], contiguous
  const float* dlse;            // [B0, B1, Hq, Sq] by dlse_strides, or NULL = zero
  void* dq;                     // shape of q
  void* dk;                     // shape of k
  void* dv;                     // shape of v
  void* dbias;                  // dtype of the bias, by dbias_strides, summed over its zero strides
  void* workspace;              // ..._workspace(params) bytes, aligned to 256, with any contents
  const int32_t* cu_seqlens_q;  // [num_seqs + 1] on the device, or NULL
  const int32_t* cu_seqlens_k;  // [num_seqs + 1] on the device, or NULL
  FlashsciStrides q_strides, k_strides, v_strides, out_strides, dout_strides, dlse_strides;
  FlashsciStrides dq_strides, dk_strides, dv_strides;
  FlashsciBiasMask bias_mask;          // dense only
  FlashsciScoreStrides dbias_strides;  // contiguous where the bias has a size, 0 where it has none;
                                       // kernels of csrc/sm90/pair: as bias_strides
  int64_t batch0, batch1;
  int32_t heads_q, heads_k;
  int32_t seq_q, seq_k;
  int32_t num_seqs;
  int32_t max_seqlen_q, max_seqlen_k;  // hints, -1 unknown; packed only
  int32_t head_dim, head_dim_v;
  float scale, softcap;
  int32_t window_left, window_right;
  int32_t lower_right;
  int32_t deterministic;  // bitwise equal from run to run
  int32_t precision;
  int32_t copy_bytes;  // 16, 8, 4 or 2: alignment of the rows of q, k, v, out and dout
  int32_t device;
  int32_t shared_per_sm;
} FlashsciBackwardParams;

// Row indices, their differences and sums with a window must fit 32 bits.
#define FLASHSCI_MAX_SEQ (1 << 29)
#define FLASHSCI_MAX_HEAD_DIM 256

typedef void* FlashsciStream;  // cudaStream_t

// Launchers, one of each kind for every generation and dtype that has kernels. A launcher returns
// cudaErrorNotSupported, without a launch, for strides, alignments and features that it leaves to
// an older generation.
#define FLASHSCI_DECLARE_FORWARD(unit)                                          \
  FLASHSCI_API int flashsci_forward_##unit(const FlashsciForwardParams* params, \
                                           FlashsciStream stream);
// Bytes of workspace that the call would use. Only cu_seqlens are looked at (NULL or not); no other
// pointer is read.
#define FLASHSCI_DECLARE_FORWARD_WORKSPACE(unit) \
  FLASHSCI_API int64_t flashsci_forward_##unit##_workspace(const FlashsciForwardParams* params);
#define FLASHSCI_DECLARE_BACKWARD(unit)                                           \
  FLASHSCI_API int flashsci_backward_##unit(const FlashsciBackwardParams* params, \
                                            FlashsciStream stream);               \
  /* Bytes of workspace that the call needs; pointers are not read. */            \
  FLASHSCI_API int64_t flashsci_backward_##unit##_workspace(const FlashsciBackwardParams* params);

FLASHSCI_DECLARE_FORWARD(sm75_fp16)
FLASHSCI_DECLARE_FORWARD(sm80_fp16)
FLASHSCI_DECLARE_FORWARD(sm80_bf16)
FLASHSCI_DECLARE_FORWARD(sm80_fp32)
FLASHSCI_DECLARE_FORWARD(sm90_fp16)
FLASHSCI_DECLARE_FORWARD(sm90_bf16)
FLASHSCI_DECLARE_FORWARD_WORKSPACE(sm90_fp16)
FLASHSCI_DECLARE_FORWARD_WORKSPACE(sm90_bf16)
FLASHSCI_DECLARE_BACKWARD(sm75_fp16)
FLASHSCI_DECLARE_BACKWARD(sm80_fp16)
FLASHSCI_DECLARE_BACKWARD(sm80_bf16)
FLASHSCI_DECLARE_BACKWARD(sm80_fp32)

// JSON: version, digests of the kernel units, architectures, tile preset, compiler.
FLASHSCI_API const char* flashsci_build_info(void);

// NULL, or the reason why this library cannot run here: no driver, a driver older than the toolkit,
// no device.
FLASHSCI_API const char* flashsci_driver_problem(void);

#ifdef __cplusplus
}
#endif

#endif  // FLASHSCI_H_
