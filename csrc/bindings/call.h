// The arguments that forward and backward have in common: checks, the parameters of a launch, and
// the kernels that may serve the call.
//
// Bad input must raise an exception for every caller: these checks are the only ones between
// torch.ops and raw pointers.
#pragma once
#include "../include/flashsci_alibi.h"
#include "../include/flashsci_dropout.h"
#include "../include/flashsci_ragged.h"
#include "../include/flashsci_small.h"
#include "../include/flashsci_weights.h"
#include "rehearse.h"
#include "tensor.h"

namespace flashsci::bindings {

struct Options {
  int64_t max_seqlen_q, max_seqlen_k;
  double scale, softcap;
  int64_t window_left, window_right;
  bool lower_right, tf32;
  bool weighted;   // `bias` holds weights of keys, [*, Hk or 1, 1, Sk]
  bool slopes;     // it holds slopes of ALiBi, [*, Hq or 1, 1, 1]; packed [N or 1, Hq or 1, 1, 1]
  bool caps_bias;  // the softcap bounds scores with their bias or ALiBi
  int64_t generation;  // 0 = by device; 75, 80, 90 = only the kernels of that generation
  bool fp8 = false;    // q, k, v are float8_e4m3fn
  const std::optional<Tensor>* dropout_seed = nullptr;  // int64 [2]
  double dropout_p = 0;
  const std::optional<Tensor>* bias_offsets = nullptr;  // of a packed bias per pair: int64 [N + 1]

  bool has_bias_offsets() const { return bias_offsets != nullptr && bias_offsets->has_value(); }
};

// References into the arguments of an op; lives as long as its call.
struct Call {
  const Tensor &q, &k, &v;
  const std::optional<Tensor>&bias, &mask, &cu_seqlens_q, &cu_seqlens_k;
  const Options& options;
  View q_view, k_view, v_view;
  int device;
  int32_t dtype;
  int64_t num_seqs = 0;

  Call(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
       const std::optional<Tensor>& mask, const std::optional<Tensor>& cu_seqlens_q,
       const std::optional<Tensor>& cu_seqlens_k, const Options& options);

  std::string shapes() const { return shape_of(q) + ", " + shape_of(k) + ", " + shape_of(v); }
  int64_t rows() const { return q_view.size[0] * q_view.size[1] * q_view.size[2] * q_view.size[3]; }
  uint64_t stride_bits() const;     // View::alignment_bits of q, k and v
  FlashsciDropout dropout() const;  // seed null: none
  // Raises unless a launch succeeded; `cudaErrorNotSupported`: no kernel serves the call.
  void require(const char* what, cudaError_t error) const;

  // The fields that both kinds of parameters have.
  template <class Params>
  void describe_in(Params& p) const {
    p.q = address_of(q);
    p.k = address_of(k);
    p.v = address_of(v);
    p.q_strides = q_view.strides();
    p.k_strides = k_view.strides();
    p.v_strides = v_view.strides();
    if (cu_seqlens_q.has_value()) {
      p.cu_seqlens_q = static_cast<const int32_t*>(address_of(*cu_seqlens_q));
      p.cu_seqlens_k = static_cast<const int32_t*>(address_of(*cu_seqlens_k));
    }
    p.num_seqs = static_cast<int32_t>(num_seqs);
    p.max_seqlen_q = clamp_int32(options.max_seqlen_q);
    if (bias.has_value()) {
      p.bias_mask.bias = address_of(*bias);
      FlashsciScoreStrides& strides = p.bias_mask.bias_strides = View(*bias).pair_strides();
      if (options.slopes && cu_seqlens_q.has_value())
        strides.batch0 = strides.batch1, strides.batch1 = 0;
      else if (cu_seqlens_q.has_value())
        describe_ragged(p.bias_mask);
      p.bias_mask.capped =
          options.caps_bias && !options.weighted && static_cast<float>(options.softcap) != 0.f;
      p.bias_mask.bias_is_fp32 = options.weighted ? FLASHSCI_KEY_WEIGHTS
                                 : options.slopes ? FLASHSCI_ALIBI_SLOPES
                                                  : dtype_of(*bias) == dtypes().single;
    }
    if (mask.has_value()) {
      p.bias_mask.mask = static_cast<const uint8_t*>(address_of(*mask));
      p.bias_mask.mask_strides = View(*mask).pair_strides();
    }
    p.batch0 = q_view.size[0];
    p.batch1 = q_view.size[1];
    p.heads_q = static_cast<int32_t>(q_view.size[2]);
    p.heads_k = static_cast<int32_t>(k_view.size[2]);
    p.seq_q = static_cast<int32_t>(q_view.size[3]);
    p.seq_k = static_cast<int32_t>(k_view.size[3]);
    p.head_dim = static_cast<int32_t>(q_view.size[4]);
    p.head_dim_v = static_cast<int32_t>(v_view.size[4]);
    p.scale = static_cast<float>(options.scale);
    p.softcap = static_cast<float>(options.softcap);
    p.window_left = clamp_int32(options.window_left);
    p.window_right = clamp_int32(options.window_right);
    p.lower_right = options.lower_right;
    p.precision = options.tf32 ? FLASHSCI_TF32 : FLASHSCI_TF32X3;
    p.device = device;
    p.shared_per_sm = describe(device).shared_per_sm;
  }

  // The fields of flashsci_ragged.h.
  void describe_ragged(FlashsciBiasMask& bias_mask) const;

  static int32_t clamp_int32(int64_t value) {
    return static_cast<int32_t>(
        std::clamp<int64_t>(value, -1, std::numeric_limits<int32_t>::max()));
  }
};

// The strides of a bias of a packed call, and of its gradient (flashsci_ragged.h).
FlashsciScoreStrides ragged_strides(const Tensor& bias);

// Checks out, dout or a gradient of them: shape [B0, B1, Hq, Sq, Dv] in q's dtype, last dim
// contiguous.
View check_out(const Tensor& x, const char* name, const Call& call);

// One unit of this build: the launcher of a forward, or those of a backward, of one dtype.
struct Kernels {
  int generation;
  int (*forward)(const FlashsciForwardParams*, FlashsciStream);
  int64_t (*forward_workspace)(const FlashsciForwardParams*);  // or null: none
  int (*backward)(const FlashsciBackwardParams*, FlashsciStream);
  int64_t (*workspace)(const FlashsciBackwardParams*);
  int (*takes_pairs)(const FlashsciForwardParams*);  // or null: no unit of csrc/sm90/pair
  bool takes_weights;
  bool takes_slopes;  // of ALiBi, and a bias of packed calls
  // Or null: those above, which then are null, have calls without dropout.
  int (*forward_dropping)(const FlashsciForwardParams*, const FlashsciDropout*, FlashsciStream);
  int (*backward_dropping)(const FlashsciBackwardParams*, const FlashsciDropout*, FlashsciStream);
};

// The units of a dtype: those of csrc/sm90/pair and csrc/sm80/small, newest generation first, and that of
// csrc/sm80/weights; the last one is empty.
const Kernels* kernels_of(int32_t dtype);

// The largest power of 2 up to 16 that divides all strides and addresses of rows, in bytes.
template <class... Pointers>
int32_t alignment_of(uint64_t stride_bits, Pointers... rows) {
  const uint64_t bits = (stride_bits | ... | reinterpret_cast<uint64_t>(rows)) | 16;
  return static_cast<int32_t>(bits & -bits);
}

// The common part of calls of equal shapes, strides and options: everything except the addresses of
// their tensors. An op makes one for its own call; Python keeps one for many calls
// (flashsci/backends/cuda).
template <class Params>
struct Prepared {
  Params params;
  uint64_t stride_bits;  // View::alignment_bits of the tensors that `copy_bytes` covers
  int32_t dtype, generation;
  FlashsciDropout dropout;

  explicit Prepared(const Call& call)
      : params{},
        stride_bits(call.stride_bits()),
        dtype(call.dtype),
        generation(static_cast<int32_t>(call.options.generation)),
        dropout(call.dropout()) {
    call.describe_in(params);
  }

  template <class... Pointers>
  int32_t copy_bytes(Pointers... rows) const {
    return alignment_of(stride_bits, rows...);
  }

  bool drops() const { return dropout.seed != nullptr; }

  // Calls launch(kernels) for the generations that run on the device, newest first, until one
  // returns something else than cudaErrorNotSupported.
  template <class Launch>
  cudaError_t launch_first(Launch&& launch) const {
    const int capability = describe(params.device).capability;
    for (const Kernels* kernels = kernels_of(dtype); kernels->generation != 0; ++kernels) {
      const int unit = kernels->generation;
      if (generation != 0 && generation != unit) continue;
      if (params.bias_mask.bias_is_fp32 == FLASHSCI_KEY_WEIGHTS && !kernels->takes_weights)
        continue;
      const bool packed_bias = params.cu_seqlens_q != nullptr && params.bias_mask.bias != nullptr;
      if ((packed_bias || params.bias_mask.bias_is_fp32 == FLASHSCI_ALIBI_SLOPES) &&
          !kernels->takes_slopes)
        continue;
      if (params.bias_mask.capped && unit != 80) continue;
      // Hopper's instructions have no successor. The PTX of the others runs on everything newer;
      // Turing's only on request.
      if (unit == 90 ? capability / 10 != 9 : capability < unit) continue;
      if (unit == 75 && capability >= 80 && generation != 75) continue;
      const auto error = static_cast<cudaError_t>(launch(*kernels));
      if (error != cudaErrorNotSupported) return error;
    }
    return cudaErrorNotSupported;
  }
};

// Whether such calls are served by the kernels of csrc/sm90/pair.
inline bool takes_pairs(const Prepared<FlashsciForwardParams>& prepared) {
  if (prepared.drops()) return false;
  FlashsciForwardParams p = prepared.params;
  p.copy_bytes = prepared.copy_bytes(p.q, p.k, p.v);
  const cudaError_t found = prepared.launch_first([&](const Kernels& kernels) -> int {
    return kernels.takes_pairs != nullptr && kernels.takes_pairs(&p) ? cudaSuccess
                                                                     : cudaErrorNotSupported;
  });
  return found == cudaSuccess;
}

// For Python, which asks for no reason: it repeats a failed call through the op, which raises.
template <class Launch>
int succeeds(int device, Launch&& launch) {
  try {
    int current = -1;
    return cudaGetDevice(&current) == cudaSuccess && current == device && launch() == cudaSuccess;
  } catch (...) {
    return 0;
  }
}

}  // namespace flashsci::bindings
