#include "call.h"
#include "../include/flashsci_pair.h"

extern "C" {
FLASHSCI_DECLARE_BACKWARD(sm90_fp16)
FLASHSCI_DECLARE_BACKWARD(sm90_bf16)
}

namespace flashsci::bindings {

namespace {

void check_offsets(const Tensor& cu_seqlens, const char* name, int device) {
  FLASHSCI_CHECK(is_on(cu_seqlens, device), name, " must be on the device of q");
  FLASHSCI_CHECK(dtype_of(cu_seqlens) == dtypes().int32, name, " must be int32");
  FLASHSCI_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1 &&
                     (cu_seqlens.stride(0) == 1 || cu_seqlens.size(0) == 1),
                 name, " must be a contiguous vector of N + 1 offsets, got shape ",
                 shape_of(cu_seqlens), cu_seqlens.dim() == 1 ? "; call .contiguous()" : "");
}

// Bias or mask: q's rank, each dim 1 or that of [B0, B1, Hq, Sq, Sk].
void check_bias_mask(const Tensor& bias_mask, const char* name, const Call& call) {
  FLASHSCI_CHECK(is_on(bias_mask, call.device), name, " must be on the device of q");
  FLASHSCI_CHECK(!call.cu_seqlens_q.has_value(), "packed calls take no ", name);
  FLASHSCI_CHECK(bias_mask.dim() == call.q.dim(), name, " must have as many dims as q, got ",
                 shape_of(bias_mask), " beside ", call.shapes());
  const View view(bias_mask);
  for (int i = 0; i < kMaxRank; ++i)
    FLASHSCI_CHECK(
        view.size[i] == 1 || view.size[i] == (i < 4 ? call.q_view.size[i] : call.k_view.size[3]),
        name, " ", shape_of(bias_mask), " does not broadcast to the scores of ", call.shapes());
}

// A bias of a packed call: [Hb, pairs] with the starts of blocks, or [Hb, 1, Tk]; Hb is 1 or Hq.
void check_ragged(const Tensor& bias, const Call& call) {
  FLASHSCI_CHECK(is_on(bias, call.device), "bias must be on the device of q");
  const bool by_pairs = call.options.has_bias_offsets();
  const int64_t last = bias.dim() - 1;
  FLASHSCI_CHECK(bias.dim() == (by_pairs ? 2 : 3) &&
                     (by_pairs || (bias.size(1) == 1 && bias.size(2) == call.k_view.size[3])),
                 "a packed bias must be [Hq or 1, pairs] with bias_offsets, or [Hq or 1, 1, Tk] "
                 "without, got ",
                 shape_of(bias), " beside ", call.shapes());
  FLASHSCI_CHECK(bias.size(0) == 1 || bias.size(0) == call.q_view.size[2], "bias ", shape_of(bias),
                 " does not broadcast to the heads of ", call.shapes());
  FLASHSCI_CHECK(bias.stride(last) == 1 || bias.size(last) <= 1,
                 "the keys of a packed bias must be neighbours in memory; call .contiguous()");
  if (!by_pairs) return;
  const Tensor& starts = **call.options.bias_offsets;
  FLASHSCI_CHECK(is_on(starts, call.device), "bias_offsets must be on the device of q");
  FLASHSCI_CHECK(dtype_of(starts) == dtypes().int64 && starts.dim() == 1 &&
                     starts.size(0) == call.num_seqs + 1 &&
                     (starts.stride(0) == 1 || starts.size(0) == 1),
                 "bias_offsets must be a contiguous int64 vector of N + 1 block starts, got shape ",
                 shape_of(starts));
}

// Slopes of ALiBi: each dim 1 or that of [B0, B1, Hq, 1, 1], or of [N, Hq, 1, 1] for packed calls.
void check_slopes(const Tensor& slopes, const Call& call) {
  const bool packed = call.cu_seqlens_q.has_value();
  FLASHSCI_CHECK(is_on(slopes, call.device), "alibi_slopes must be on the device of q");
  FLASHSCI_CHECK(dtype_of(slopes) == dtypes().single, "alibi_slopes must be float32");
  FLASHSCI_CHECK(slopes.dim() == call.q.dim() + packed,
                 "alibi_slopes must be [*, Hq or 1, 1, 1], packed [N or 1, Hq or 1, 1, 1], got ",
                 shape_of(slopes), " beside ", call.shapes());
  const View view(slopes);
  const int64_t sizes[kMaxRank] = {packed ? 1 : call.q_view.size[0],
                                   packed ? call.num_seqs : call.q_view.size[1],
                                   call.q_view.size[2], 1, 1};
  for (int i = 0; i < kMaxRank; ++i)
    FLASHSCI_CHECK(view.size[i] == 1 || view.size[i] == sizes[i], "alibi_slopes ", shape_of(slopes),
                   " do not broadcast to the heads of ", call.shapes());
}

// Weights of keys: each dim 1 or that of [B0, B1, Hk, 1, Sk].
void check_weights(const Tensor& weights, const Call& call) {
  FLASHSCI_CHECK(is_on(weights, call.device), "key_weight must be on the device of q");
  FLASHSCI_CHECK(!call.cu_seqlens_q.has_value(), "packed calls take no key_weight");
  FLASHSCI_CHECK(dtype_of(weights) == dtypes().single, "key weights must be float32");
  FLASHSCI_CHECK(weights.dim() == call.q.dim() && weights.size(call.q.dim() - 2) == 1,
                 "key weights must be [*, Hk or 1, 1, Sk], in the place of a bias, got ",
                 shape_of(weights), " beside ", call.shapes());
  const View view(weights);
  const int64_t sizes[kMaxRank] = {call.q_view.size[0], call.q_view.size[1], call.k_view.size[2], 1,
                                   call.k_view.size[3]};
  for (int i = 0; i < kMaxRank; ++i)
    FLASHSCI_CHECK(view.size[i] == 1 || view.size[i] == sizes[i], "key weights ", shape_of(weights),
                   " do not broadcast to the keys of ", call.shapes());
}

const Tensor& given(const Tensor& x, const char* name) {
  check_given(x, name);
  return x;
}

}  // namespace

Call::Call(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
           const std::optional<Tensor>& mask, const std::optional<Tensor>& cu_seqlens_q,
           const std::optional<Tensor>& cu_seqlens_k, const Options& options)
    : q(q),
      k(k),
      v(v),
      bias(bias),
      mask(mask),
      cu_seqlens_q(cu_seqlens_q),
      cu_seqlens_k(cu_seqlens_k),
      options(options),
      q_view(given(q, "q")),
      k_view(given(k, "k")),
      v_view(given(v, "v")),
      device(rehearsing() ? 0 : q.get_device_index()),
      dtype(dtype_of(q)) {
  FLASHSCI_CHECK(rehearsing() || (q.is_cuda() && k.is_cuda() && v.is_cuda()),
                 "q, k and v must be CUDA tensors");
  FLASHSCI_CHECK(is_on(k, device) && is_on(v, device),
                 "q, k and v must be on one device, got cuda:", device,
                 ", cuda:", k.get_device_index(), " and cuda:", v.get_device_index());
  FLASHSCI_CHECK(
      options.fp8 ? dtype == dtypes().e4m3
                  : dtype == dtypes().half || dtype == dtypes().brain || dtype == dtypes().single,
      "q, k and v must be ", options.fp8 ? "float8_e4m3fn" : "float16, bfloat16 or float32");
  FLASHSCI_CHECK(dtype_of(k) == dtype && dtype_of(v) == dtype, "q, k and v must share one dtype");
  const int64_t rank = q.dim();
  FLASHSCI_CHECK(rank >= 2 && rank <= kMaxRank && k.dim() == rank && v.dim() == rank,
                 "q, k and v must have the same number of dims, 2 to 5, got ", shapes());
  const int64_t heads_q = q_view.size[2], heads_k = k_view.size[2];
  const int64_t head_dim = q_view.size[4], head_dim_v = v_view.size[4];
  for (int i = 0; i < 2; ++i)
    FLASHSCI_CHECK(q_view.size[i] == k_view.size[i] && q_view.size[i] == v_view.size[i],
                   "the leading dims of q, k and v differ: ", shapes());
  FLASHSCI_CHECK(heads_k == v_view.size[2] && k_view.size[3] == v_view.size[3],
                 "k and v must have the same heads and keys: ", shapes());
  FLASHSCI_CHECK(k_view.size[4] == head_dim, "q and k must have the same head dim: ", shapes());
  FLASHSCI_CHECK(head_dim >= 1 && head_dim <= FLASHSCI_MAX_HEAD_DIM && head_dim_v >= 1 &&
                     head_dim_v <= FLASHSCI_MAX_HEAD_DIM,
                 "head dims must be 1 to 256: ", shapes());
  FLASHSCI_CHECK(heads_q == 0 || (heads_k > 0 && heads_q % heads_k == 0),
                 "the heads of q must be a multiple of those of k: ", shapes());
  FLASHSCI_CHECK(q_view.size[3] <= FLASHSCI_MAX_SEQ && k_view.size[3] <= FLASHSCI_MAX_SEQ,
                 "sequences are limited to 2^29 rows: ", shapes());
  FLASHSCI_CHECK(heads_q <= std::numeric_limits<int32_t>::max(), "too many heads: ", shapes());
  for (const View* view : {&q_view, &k_view, &v_view})
    FLASHSCI_CHECK(view->stride[4] == 1 || view->size[4] == 1,
                   "the last dim of q, k and v must be contiguous");
  // In float, as kernels take them: a finite double may overflow there.
  FLASHSCI_CHECK(std::isfinite(static_cast<float>(options.scale)), "scale must be finite, got ",
                 options.scale);
  FLASHSCI_CHECK(options.softcap >= 0 && std::isfinite(static_cast<float>(options.softcap)),
                 "softcap must be >= 0 and finite, got ", options.softcap);
  FLASHSCI_CHECK(options.window_left >= -1 && options.window_right >= -1,
                 "window_left and window_right must be >= 0, or -1 for unbounded, got ",
                 options.window_left, " and ", options.window_right);
  FLASHSCI_CHECK(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(),
                 "cu_seqlens_q and cu_seqlens_k go together");
  if (cu_seqlens_q.has_value()) {
    FLASHSCI_CHECK(rank == 3, "packed tensors are [heads, tokens, dim], got ", shapes());
    check_offsets(*cu_seqlens_q, "cu_seqlens_q", device);
    check_offsets(*cu_seqlens_k, "cu_seqlens_k", device);
    num_seqs = cu_seqlens_q->size(0) - 1;
    FLASHSCI_CHECK(cu_seqlens_k->size(0) - 1 == num_seqs,
                   "cu_seqlens_q and cu_seqlens_k must have the same length");
    FLASHSCI_CHECK(num_seqs <= FLASHSCI_MAX_SEQ, "too many sequences");
  }
  FLASHSCI_CHECK(!options.has_bias_offsets() || (bias.has_value() && cu_seqlens_q.has_value() &&
                                                 !options.slopes && !options.weighted),
                 "bias_offsets belong to a bias of packed calls");
  FLASHSCI_CHECK(!(options.slopes && (options.weighted || !bias.has_value())),
                 "alibi_slopes stand in the place of a bias, without key weights");
  FLASHSCI_CHECK(!options.weighted || bias.has_value(),
                 "key weights must be [*, Hk or 1, 1, Sk], in the place of a bias");
  if (options.slopes) {
    check_slopes(*bias, *this);
  } else if (options.weighted) {
    check_weights(*bias, *this);
  } else if (bias.has_value()) {
    if (cu_seqlens_q.has_value())
      check_ragged(*bias, *this);
    else
      check_bias_mask(*bias, "bias", *this);
    const int32_t bias_dtype = dtype_of(*bias);
    FLASHSCI_CHECK(bias_dtype == dtype || bias_dtype == dtypes().single,
                   "bias must have q's dtype or float32");
  }
  if (mask.has_value()) {
    check_bias_mask(*mask, "mask", *this);
    FLASHSCI_CHECK(dtype_of(*mask) == dtypes().boolean, "mask must be bool");
  }
}

FlashsciScoreStrides ragged_strides(const Tensor& bias) {
  return {0, 0, bias.size(0) == 1 ? 0 : bias.stride(0), 0, 1};
}

void Call::describe_ragged(FlashsciBiasMask& bias_mask) const {
  bias_mask.bias_strides = ragged_strides(*bias);
  if (!options.has_bias_offsets()) return;
  bias_mask.mask_strides.batch0 = reinterpret_cast<intptr_t>(address_of(**options.bias_offsets));
  bias_mask.mask_strides.batch1 = bias->size(1);
}

FlashsciDropout Call::dropout() const {
  if (options.dropout_p == 0) return {};
  FLASHSCI_CHECK(options.dropout_p > 0 && options.dropout_p < 1,
                 "dropout_p must be in [0, 1), got ", options.dropout_p);
  FLASHSCI_CHECK(options.dropout_seed != nullptr && options.dropout_seed->has_value(),
                 "dropout_p needs a dropout_seed");
  const Tensor& seed = **options.dropout_seed;
  FLASHSCI_CHECK(is_on(seed, device), "dropout_seed must be on the device of q");
  FLASHSCI_CHECK(dtype_of(seed) == dtypes().int64 && seed.dim() == 1 && seed.size(0) == 2 &&
                     seed.stride(0) == 1,
                 "dropout_seed must be int64 [2], contiguous, got ", shape_of(seed));
  constexpr double kNumbers = 65536.;  // of 16 bits
  const double threshold = std::min(std::nearbyint(options.dropout_p * kNumbers), kNumbers - 1);
  return {static_cast<const int64_t*>(address_of(seed)), static_cast<uint32_t>(threshold),
          static_cast<float>(1 / (1 - options.dropout_p))};
}

uint64_t Call::stride_bits() const {
  const int size = size_of(dtype);
  return q_view.alignment_bits(size) | k_view.alignment_bits(size) | v_view.alignment_bits(size);
}

void Call::require(const char* what, cudaError_t error) const {
  FLASHSCI_CHECK(error == cudaSuccess || error == cudaErrorNotSupported, what,
                 ": launch failed: ", cudaGetErrorName(error), " (", cudaGetErrorString(error),
                 ") for ", shapes(), "; built as ", flashsci_build_info());
  if (error == cudaSuccess) return;
  const int capability = describe(device).capability;
  const char* name = dtype == dtypes().half     ? "float16"
                     : dtype == dtypes().single ? "float32"
                                                : "bfloat16";
  std::ostringstream forced;
  if (options.generation != 0) forced << " of generation sm" << options.generation;
  STD_TORCH_CHECK(false, "flashsci: ", what, ": no ", name, " kernel", forced.str(),
                  " serves this call on compute capability ", capability / 10, ".", capability % 10,
                  " in this build (", flashsci_build_info(), "): ", shapes(),
                  "; use backend=\"triton\" or \"sdpa\"");
}

View check_out(const Tensor& x, const char* name, const Call& call) {
  check_given(x, name);
  FLASHSCI_CHECK(is_on(x, call.device), name, " must be on the device of q");
  FLASHSCI_CHECK(dtype_of(x) == call.dtype, name, " must have q's dtype");
  FLASHSCI_CHECK(x.dim() == call.q.dim(), name, " must have as many dims as q, got ", shape_of(x));
  const View view(x);
  for (int i = 0; i < kMaxRank; ++i)
    FLASHSCI_CHECK(view.size[i] == (i < 4 ? call.q_view.size[i] : call.v_view.size[4]), name,
                   " has shape ", shape_of(x), " beside ", call.shapes());
  FLASHSCI_CHECK(view.stride[4] == 1 || view.size[4] == 1, "the last dim of ", name,
                 " must be contiguous");
  return view;
}

#define FORWARD(generation, unit) {generation, flashsci_forward_##unit}
#define FORWARD_IN_WORKSPACE(generation, unit) \
  {generation, flashsci_forward_##unit, flashsci_forward_##unit##_workspace}
#define FORWARD_WITH_SLOPES(generation, unit) \
  {generation, flashsci_forward_##unit, nullptr, nullptr, nullptr, nullptr, false, true}
#define BACKWARD(generation, unit) \
  {generation, nullptr, nullptr, flashsci_backward_##unit, flashsci_backward_##unit##_workspace}
#define BACKWARD_WITH_SLOPES(generation, unit)                                                   \
  {generation, nullptr, nullptr, flashsci_backward_##unit, flashsci_backward_##unit##_workspace, \
   nullptr,    false,   true}
#define SMALL(dtype, takes_weights)             \
  {80,                                          \
   flashsci_forward_small_##dtype,              \
   nullptr,                                     \
   flashsci_backward_small_##dtype,             \
   flashsci_backward_small_##dtype##_workspace, \
   nullptr,                                     \
   takes_weights}
#define DROPOUT(dtype)                            \
  {80,                                            \
   nullptr,                                       \
   nullptr,                                       \
   nullptr,                                       \
   flashsci_backward_dropout_##dtype##_workspace, \
   nullptr,                                       \
   false,                                         \
   true,                                          \
   flashsci_forward_dropout_##dtype,              \
   flashsci_backward_dropout_##dtype}
#define WEIGHTS(dtype)                            \
  {80,                                            \
   flashsci_forward_weights_##dtype,              \
   flashsci_forward_weights_##dtype##_workspace,  \
   flashsci_backward_weights_##dtype,             \
   flashsci_backward_weights_##dtype##_workspace, \
   nullptr,                                       \
   true}
#define PAIRS(unit)                      \
  {90,                                   \
   flashsci_forward_##unit,              \
   nullptr,                              \
   flashsci_backward_##unit,             \
   flashsci_backward_##unit##_workspace, \
   flashsci_takes_##unit}
const Kernels* kernels_of(int32_t dtype) {
  static const Kernels half[] = {
#ifdef FLASHSCI_HAVE_SM90_PAIR_FP16
      PAIRS(pair_fp16),
#endif
#ifdef FLASHSCI_HAVE_SM80_SMALL_FP16
      SMALL(fp16, false),
#endif
#ifdef FLASHSCI_HAVE_SM90_FWD_FP16
      FORWARD_IN_WORKSPACE(90, sm90_fp16),
#endif
#ifdef FLASHSCI_HAVE_SM90_BWD_FP16
      BACKWARD(90, sm90_fp16),
#endif
#ifdef FLASHSCI_HAVE_SM80_FWD_FP16
      FORWARD_WITH_SLOPES(80, sm80_fp16),
#endif
#ifdef FLASHSCI_HAVE_SM80_BWD_FP16
      BACKWARD_WITH_SLOPES(80, sm80_fp16),
#endif
#ifdef FLASHSCI_HAVE_SM80_DROPOUT_FP16
      DROPOUT(fp16),
#endif
#ifdef FLASHSCI_HAVE_SM75_FWD_FP16
      FORWARD(75, sm75_fp16),
#endif
#ifdef FLASHSCI_HAVE_SM75_BWD_FP16
      BACKWARD(75, sm75_fp16),
#endif
#ifdef FLASHSCI_HAVE_SM80_WEIGHTS_FP32
      WEIGHTS(fp16),
#endif
      {}};
  static const Kernels brain[] = {
#ifdef FLASHSCI_HAVE_SM90_PAIR_BF16
      PAIRS(pair_bf16),
#endif
#ifdef FLASHSCI_HAVE_SM80_SMALL_BF16
      SMALL(bf16, false),
#endif
#ifdef FLASHSCI_HAVE_SM90_FWD_BF16
      FORWARD_IN_WORKSPACE(90, sm90_bf16),
#endif
#ifdef FLASHSCI_HAVE_SM90_BWD_BF16
      BACKWARD(90, sm90_bf16),
#endif
#ifdef FLASHSCI_HAVE_SM80_FWD_BF16
      FORWARD_WITH_SLOPES(80, sm80_bf16),
#endif
#ifdef FLASHSCI_HAVE_SM80_BWD_BF16
      BACKWARD_WITH_SLOPES(80, sm80_bf16),
#endif
#ifdef FLASHSCI_HAVE_SM80_DROPOUT_BF16
      DROPOUT(bf16),
#endif
#ifdef FLASHSCI_HAVE_SM80_WEIGHTS_FP32
      WEIGHTS(bf16),
#endif
      {}};
  static const Kernels single[] = {
#ifdef FLASHSCI_HAVE_SM90_PAIR_FP32
      PAIRS(pair_fp32),
#endif
#ifdef FLASHSCI_HAVE_SM80_SMALL_FP32
      SMALL(fp32, true),
#endif
#ifdef FLASHSCI_HAVE_SM80_FWD_FP32
      FORWARD_WITH_SLOPES(80, sm80_fp32),
#endif
#ifdef FLASHSCI_HAVE_SM80_BWD_FP32
      BACKWARD_WITH_SLOPES(80, sm80_fp32),
#endif
#ifdef FLASHSCI_HAVE_SM80_WEIGHTS_FP32
      WEIGHTS(fp32),
#endif
      {}};
  return dtype == dtypes().half ? half : dtype == dtypes().brain ? brain : single;
}

}  // namespace flashsci::bindings
