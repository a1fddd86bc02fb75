// flashsci::cuda_forward: output allocation and launch; also prepared launches for repeated calls.
#include <tuple>

#include "../include/flashsci_pair.h"
#include "call.h"

namespace {

using namespace flashsci::bindings;

using Forward = Prepared<FlashsciForwardParams>;

Forward prepare(const Call& call, const Tensor& out) {
  Forward prepared(call);
  prepared.params.out_strides = View(out).strides();
  return prepared;
}

// Launches with the addresses of this call in `p`.
cudaError_t launch(const Forward& prepared, FlashsciForwardParams p, void* stream) {
  p.copy_bytes = prepared.copy_bytes(p.q, p.k, p.v);
  return prepared.launch_first([&](const Kernels& kernels) -> int {
    if (prepared.drops())
      return kernels.forward_dropping == nullptr
                 ? int{cudaErrorNotSupported}
                 : kernels.forward_dropping(&p, &prepared.dropout, stream);
    if (kernels.forward == nullptr) return cudaErrorNotSupported;
    const int64_t bytes[] = {kernels.forward_workspace == nullptr ? 0
                                                                  : kernels.forward_workspace(&p)};
    if (bytes[0] == 0) return kernels.forward(&p, stream);
    Tensor workspace = empty_contiguous(1, bytes, dtypes().byte, p.device);
    p.workspace = workspace.mutable_data_ptr();
    const int error = kernels.forward(&p, stream);
    p.workspace = nullptr;
    return error;
  });
}

std::tuple<Tensor, Tensor> cuda_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& cu_seqlens_q,
    const std::optional<Tensor>& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    double scale, double softcap, int64_t window_left, int64_t window_right, bool lower_right,
    bool tf32, int64_t generation, bool weighted, bool slopes, bool caps_bias,
    const std::optional<Tensor>& dropout_seed, double dropout_p,
    const std::optional<Tensor>& bias_offsets) {
  const Options options{max_seqlen_q, max_seqlen_k,  scale,       softcap,
                        window_left,  window_right,  lower_right, tf32,
                        weighted,     slopes,        caps_bias,   generation,
                        false,        &dropout_seed, dropout_p,   &bias_offsets};
  const Call call(q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, options);
  const OnDevice on_device(call.device);
  Tensor out = empty_like_layout(q, call.v_view.size[4], call.dtype, call.device);
  Tensor lse = empty_contiguous(static_cast<int>(q.dim()) - 1, q.sizes().data(), dtypes().single,
                                call.device);
  if (call.rows() == 0 || call.k_view.size[3] == 0) {  // no query, or none that sees a key
    if (call.rows() != 0 && !rehearsing()) {
      torch::stable::zero_(out);
      torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    }
    return {std::move(out), std::move(lse)};
  }

  Forward prepared = prepare(call, out);
  prepared.params.out = out.mutable_data_ptr();
  prepared.params.lse = static_cast<float*>(lse.mutable_data_ptr());
  call.require("forward", launch(prepared, prepared.params, current_stream(call.device)));
  return {std::move(out), std::move(lse)};
}

// The kernels that the op above would launch, as `rehearse` names them.
std::string cuda_forward_kernels(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& cu_seqlens_q,
    const std::optional<Tensor>& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    double scale, double softcap, int64_t window_left, int64_t window_right, bool lower_right,
    bool tf32, int64_t generation, bool weighted, int64_t capability, int64_t processors,
    int64_t shared_per_sm, int64_t shared_per_block, bool slopes, bool caps_bias,
    const std::optional<Tensor>& dropout_seed, double dropout_p,
    const std::optional<Tensor>& bias_offsets) {
  return rehearse(capability, processors, shared_per_sm, shared_per_block, [&] {
    cuda_forward(q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale,
                 softcap, window_left, window_right, lower_right, tf32, generation, weighted,
                 slopes, caps_bias, dropout_seed, dropout_p, bias_offsets);
  });
}

// A Forward for all calls of these shapes, strides and options, none of them empty.
Tensor cuda_prepared_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                             const std::optional<Tensor>& bias, const std::optional<Tensor>& mask,
                             const std::optional<Tensor>& cu_seqlens_q,
                             const std::optional<Tensor>& cu_seqlens_k, const Tensor& out,
                             int64_t max_seqlen_q, int64_t max_seqlen_k, double scale,
                             double softcap, int64_t window_left, int64_t window_right,
                             bool lower_right, bool tf32, int64_t generation, bool weighted,
                             bool slopes, bool caps_bias) {
  const Options options{max_seqlen_q, max_seqlen_k, scale,    softcap, window_left, window_right,
                        lower_right,  tf32,         weighted, slopes,  caps_bias,   generation};
  const Call call(q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, options);
  check_out(out, "out", call);
  return kept_by_python(prepare(call, out));
}

}  // namespace

extern "C" FLASHSCI_API int flashsci_run_forward(const void* prepared, const void* q, const void* k,
                                                 const void* v, const void* bias, const void* mask,
                                                 const void* cu_seqlens_q, const void* cu_seqlens_k,
                                                 void* out, void* lse, void* stream) {
  const Forward& forward = *static_cast<const Forward*>(prepared);
  FlashsciForwardParams p = forward.params;
  p.q = q;
  p.k = k;
  p.v = v;
  p.bias_mask.bias = bias;
  p.bias_mask.mask = static_cast<const uint8_t*>(mask);
  p.cu_seqlens_q = static_cast<const int32_t*>(cu_seqlens_q);
  p.cu_seqlens_k = static_cast<const int32_t*>(cu_seqlens_k);
  p.out = out;
  p.lse = static_cast<float*>(lse);
  return succeeds(p.device, [&] { return launch(forward, p, stream); });
}

// The kernels, among those that serve such calls, that take a bias whose keys are not neighbours in
// memory without a copy by the caller (FLASHSCI_AS_GIVEN, ...): csrc/sm90/pair, or without
// gradients csrc/sm90/triangle_fwd, which makes a copy while other work runs.
extern "C" FLASHSCI_API int flashsci_takes_bias(const void* prepared) {
  const Forward& forward = *static_cast<const Forward*>(prepared);
  FlashsciForwardParams p = forward.params;
  const auto workspace = [&] {
    int64_t bytes = 0;
    forward.launch_first([&](const Kernels& kernels) -> int {
      if (kernels.forward == nullptr || kernels.takes_pairs != nullptr)
        return cudaErrorNotSupported;
      if (kernels.forward_workspace != nullptr) bytes = kernels.forward_workspace(&p);
      return cudaSuccess;
    });
    return bytes;
  };
  try {
    if (takes_pairs(forward)) return FLASHSCI_AS_GIVEN;
    const int64_t given = workspace();
    p.bias_mask.bias_strides.column = 1;
    return given != workspace() ? FLASHSCI_FORWARD_AS_GIVEN : FLASHSCI_COPIED;
  } catch (...) {
    return 0;
  }
}

STABLE_TORCH_LIBRARY_IMPL(flashsci, CUDA, m) {
  m.impl("cuda_forward", TORCH_BOX(&cuda_forward));
  m.impl("cuda_prepared_forward", TORCH_BOX(&cuda_prepared_forward));
}

STABLE_TORCH_LIBRARY_IMPL(flashsci, CompositeExplicitAutograd, m) {
  m.impl("cuda_forward_kernels", TORCH_BOX(&cuda_forward_kernels));
}
