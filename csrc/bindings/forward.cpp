// flashsci::cuda_forward: output allocation and launch.
#include <tuple>

#include "call.h"

namespace {

using namespace flashsci::bindings;

std::tuple<Tensor, Tensor> cuda_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const std::optional<Tensor>& bias,
                                        const std::optional<Tensor>& mask,
                                        const std::optional<Tensor>& cu_seqlens_q,
                                        const std::optional<Tensor>& cu_seqlens_k,
                                        int64_t max_seqlen_q, int64_t max_seqlen_k, double scale,
                                        double softcap, int64_t window_left, int64_t window_right,
                                        bool lower_right, bool tf32, int64_t generation) {
  const Options options{max_seqlen_q, max_seqlen_k, scale, softcap,   window_left,
                        window_right, lower_right,  tf32,  generation};
  const Call call(q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, options);
  const OnDevice on_device(call.device);
  Tensor out = empty_like_layout(q, call.v_view.size[4], call.dtype, call.device);
  Tensor lse = empty_contiguous(static_cast<int>(q.dim()) - 1, q.sizes().data(), dtypes().single,
                                call.device);
  if (call.rows() == 0 || call.k_view.size[3] == 0) {  // no query, or none that sees a key
    if (call.rows() != 0) {
      torch::stable::zero_(out);
      torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    }
    return {std::move(out), std::move(lse)};
  }

  FlashsciForwardParams p{};
  call.describe_in(p);
  p.out = out.mutable_data_ptr();
  p.out_strides = View(out).strides();
  p.lse = static_cast<float*>(lse.mutable_data_ptr());
  const uint64_t bits = call.alignment_bits();
  p.copy_bytes = static_cast<int32_t>(bits & -bits);
  void* stream = current_stream(call.device);
  launch_first(call, "forward", [&](const Kernels& kernels) -> int {
    if (kernels.forward == nullptr) return cudaErrorNotSupported;
    const int64_t bytes[] = {kernels.forward_workspace == nullptr ? 0
                                                                  : kernels.forward_workspace(&p)};
    if (bytes[0] == 0) return kernels.forward(&p, stream);
    Tensor workspace = empty_contiguous(1, bytes, dtypes().byte, call.device);
    p.workspace = workspace.mutable_data_ptr();
    const int error = kernels.forward(&p, stream);
    p.workspace = nullptr;
    return error;
  });
  return {std::move(out), std::move(lse)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flashsci, CUDA, m) { m.impl("cuda_forward", TORCH_BOX(&cuda_forward)); }
