// flashsci::cuda_backward: gradients and workspace allocation, and launch.
#include <tuple>

#include "call.h"

namespace {

using namespace flashsci::bindings;

enum Need { kQ = 1, kK = 2, kV = 4, kBias = 8 };  // flashsci.ops.NEED_*

// out or dout: shape [B0, B1, Hq, Sq, Dv] in q's dtype, last dim contiguous.
View check_out(const Tensor& x, const char* name, const Call& call) {
  FLASHSCI_CHECK(x.is_cuda() && x.get_device_index() == call.device, name,
                 " must be on the device of q");
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

// lse or dlse: fp32 [B0, B1, Hq, Sq], returned as strides of rows.
FlashsciStrides check_lse(const Tensor& x, const char* name, const Call& call) {
  FLASHSCI_CHECK(x.is_cuda() && x.get_device_index() == call.device, name,
                 " must be on the device of q");
  FLASHSCI_CHECK(dtype_of(x) == dtypes().single, name, " must be float32");
  FLASHSCI_CHECK(x.dim() == call.q.dim() - 1, name, " must have one dim less than q, got ",
                 shape_of(x));
  const View view(x);  // [1, B0, B1, Hq, Sq]
  for (int i = 0; i < 4; ++i)
    FLASHSCI_CHECK(view.size[i + 1] == call.q_view.size[i], name, " has shape ", shape_of(x),
                   " beside ", call.shapes());
  return {view.stride[1], view.stride[2], view.stride[3], view.stride[4]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cuda_backward(
    const std::optional<Tensor>& dout, const std::optional<Tensor>& dlse, const Tensor& q,
    const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& cu_seqlens_q,
    const std::optional<Tensor>& cu_seqlens_k, const Tensor& out, const Tensor& lse,
    int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, double softcap, int64_t window_left,
    int64_t window_right, bool lower_right, bool tf32, bool deterministic, int64_t generation,
    int64_t need) {
  const Options options{max_seqlen_q, max_seqlen_k, scale, softcap,   window_left,
                        window_right, lower_right,  tf32,  generation};
  const Call call(q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, options);
  FlashsciBackwardParams p{};
  call.describe_in(p);
  p.max_seqlen_k = Call::clamp_int32(max_seqlen_k);
  p.deterministic = deterministic;
  const int size = size_of(call.dtype);
  uint64_t bits = call.alignment_bits();
  const auto read = [&](const Tensor& x, const char* name, FlashsciStrides& strides) {
    const View view = check_out(x, name, call);
    strides = view.strides();
    bits |= view.alignment_bits(size) | reinterpret_cast<uint64_t>(x.const_data_ptr());
    return x.const_data_ptr();
  };
  p.out = read(out, "out", p.out_strides);
  if (dout.has_value()) p.dout = read(*dout, "dout", p.dout_strides);
  check_lse(lse, "lse", call);
  if (dlse.has_value()) {
    p.dlse_strides = check_lse(*dlse, "dlse", call);
    p.dlse = static_cast<const float*>(dlse->const_data_ptr());
  }
  p.copy_bytes = static_cast<int32_t>(bits & -bits);

  const OnDevice on_device(call.device);
  // Kernels read lse as one block; vmap gives it expanded, others sliced.
  std::optional<Tensor> copied;
  if (!is_contiguous(lse)) copied = torch::stable::contiguous(lse);
  p.lse = static_cast<const float*>((copied.has_value() ? *copied : lse).const_data_ptr());
  const auto gradient = [&](const Tensor& like, int bit, void*& data, FlashsciStrides& strides) {
    const int64_t nothing[] = {0};
    if (!(need & bit)) return empty_contiguous(1, nothing, call.dtype, call.device);
    Tensor made = empty_like_layout(like, like.size(like.dim() - 1), call.dtype, call.device);
    data = made.mutable_data_ptr();
    strides = View(made).strides();
    return made;
  };
  Tensor dq = gradient(q, kQ, p.dq, p.dq_strides);
  Tensor dk = gradient(k, kK, p.dk, p.dk_strides);
  Tensor dv = gradient(v, kV, p.dv, p.dv_strides);
  const bool need_bias = bias.has_value() && (need & kBias);
  const int64_t nothing[] = {0};
  Tensor dbias = empty_contiguous(need_bias ? static_cast<int>(bias->dim()) : 1,
                                  need_bias ? bias->sizes().data() : nothing,
                                  bias.has_value() ? dtype_of(*bias) : call.dtype, call.device);
  if (need_bias) {
    p.dbias = dbias.mutable_data_ptr();
    p.dbias_strides = View(dbias).pair_strides();
  }
  const auto results = [&] {
    return std::make_tuple(std::move(dq), std::move(dk), std::move(dv), std::move(dbias));
  };
  // Without a score every gradient is zero, also that of a bias which the batch shares: no kernel
  // has a block that would write it.
  if (call.rows() == 0 || call.k_view.size[3] == 0) {
    for (Tensor* made : {&dq, &dk, &dv, &dbias})
      if (made->numel() != 0) torch::stable::zero_(*made);
    return results();
  }

  void* stream = current_stream(call.device);
  launch_first(call, "backward", [&](const Kernels& kernels) -> int {
    if (kernels.backward == nullptr) return cudaErrorNotSupported;
    const int64_t bytes[] = {kernels.workspace(&p)};
    Tensor workspace = empty_contiguous(1, bytes, dtypes().byte, call.device);
    p.workspace = workspace.mutable_data_ptr();
    return kernels.backward(&p, stream);
  });
  return results();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flashsci, CUDA, m) { m.impl("cuda_backward", TORCH_BOX(&cuda_backward)); }
