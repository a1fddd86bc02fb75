// flashsci::cuda_backward: allocation of gradients and workspace, and launch; also prepared
// launches for repeated calls.
#include <algorithm>
#include <tuple>

#include "call.h"

namespace {

using namespace flashsci::bindings;

using Backward = Prepared<FlashsciBackwardParams>;

enum Need { kQ = 1, kK = 2, kV = 4, kBias = 8 };  // flashsci.ops.NEED_*

// lse or dlse: fp32 [B0, B1, Hq, Sq], returned as row strides.
FlashsciStrides check_lse(const Tensor& x, const char* name, const Call& call) {
  check_given(x, name);
  FLASHSCI_CHECK(is_on(x, call.device), name, " must be on the device of q");
  FLASHSCI_CHECK(dtype_of(x) == dtypes().single, name, " must be float32");
  FLASHSCI_CHECK(x.dim() == call.q.dim() - 1, name, " must have one dim less than q, got ",
                 shape_of(x));
  const View view(x);  // [1, B0, B1, Hq, Sq]
  for (int i = 0; i < 4; ++i)
    FLASHSCI_CHECK(view.size[i + 1] == call.q_view.size[i], name, " has shape ", shape_of(x),
                   " beside ", call.shapes());
  return {view.stride[1], view.stride[2], view.stride[3], view.stride[4]};
}

Backward prepare(const Call& call, const std::optional<Tensor>& dout,
                 const std::optional<Tensor>& dlse, const Tensor& out, const Tensor& lse,
                 bool deterministic) {
  Backward prepared(call);
  FlashsciBackwardParams& p = prepared.params;
  p.max_seqlen_k = Call::clamp_int32(call.options.max_seqlen_k);
  p.deterministic = deterministic;
  const auto strides = [&](const Tensor& x, const char* name) {
    const View view = check_out(x, name, call);
    prepared.stride_bits |= view.alignment_bits(size_of(call.dtype));
    return view.strides();
  };
  p.out_strides = strides(out, "out");
  if (dout.has_value()) p.dout_strides = strides(*dout, "dout");
  check_lse(lse, "lse", call);
  if (dlse.has_value()) p.dlse_strides = check_lse(*dlse, "dlse", call);
  return prepared;
}

// Whether sm80's kernels are faster than Hopper's on Hopper
// (docs/develop/kernels/sm90_backward.md): Hopper's tiles of 128 keys and 64 head dims are mostly
// padding for short calls. The gain is smaller with few heads (measured).
bool is_short(const FlashsciBackwardParams& p) {
  constexpr int64_t kManyHeads = 132;
  if (p.cu_seqlens_q != nullptr || p.bias_mask.bias != nullptr || p.bias_mask.mask != nullptr)
    return false;
  const int dim = std::max(p.head_dim, p.head_dim_v), rows = std::max(p.seq_q, p.seq_k);
  const bool many = p.batch0 * p.batch1 * p.heads_q >= kManyHeads;
  return dim <= 32 ? rows <= (many ? 512 : 128) : dim <= 64 && rows <= (many ? 128 : 64);
}

// Whether a bias or its gradient has a number for every score, and rows of whole 16 bytes that are
// longer than its keys. Kernels write the gradient of such a bias in the same way, unless a window
// hides scores: they clear dense memory then.
bool has_pitch(const Tensor& x, const Call& call) {
  const int rank = static_cast<int>(x.dim());
  if (rank < 2 || call.cu_seqlens_q.has_value() || call.options.window_left >= 0 ||
      call.options.window_right >= 0)
    return false;
  const View view(x);
  for (int i = 0; i < kMaxRank - 1; ++i)
    if (view.size[i] != call.q_view.size[i]) return false;
  const int64_t keys = x.size(rank - 1), row = x.stride(rank - 2);
  return size_of(dtype_of(x)) == 2 && x.stride(rank - 1) == 1 && row > keys && row % 8 == 0 &&
         keys % 8 != 0 && keys == call.k_view.size[3];
}

// flashsci.call.ops.empty_bias_gradient.
Tensor empty_bias_gradient(const Tensor& bias, const Call& call) {
  const int rank = static_cast<int>(bias.dim());
  return has_pitch(bias, call)
             ? empty_pitched(rank, bias.sizes().data(), 8, dtype_of(bias), call.device)
             : empty_contiguous(rank, bias.sizes().data(), dtype_of(bias), call.device);
}

// The gradient of slopes of ALiBi as sums over keys, [B0, B1, Hq, Sq].
Tensor empty_slope_sums(const Tensor& lse, const Call& call) {
  return empty_contiguous(static_cast<int>(lse.dim()), lse.sizes().data(), dtypes().single,
                          call.device);
}

// Launches with the addresses of this call in `p`.
cudaError_t launch(const Backward& prepared, FlashsciBackwardParams p, void* stream) {
  p.copy_bytes = prepared.copy_bytes(p.q, p.k, p.v, p.out, p.dout);
  const auto launch_on = [&](const Kernels& kernels) -> int {
    if (prepared.drops() ? kernels.backward_dropping == nullptr : kernels.backward == nullptr)
      return cudaErrorNotSupported;
    // Only kernels of csrc/sm90/pair write it in another order than row-major.
    if (p.dbias != nullptr && p.dbias_strides.column > 1 && kernels.takes_pairs == nullptr)
      return cudaErrorNotSupported;
    const int64_t bytes[] = {kernels.workspace(&p)};
    Tensor workspace = empty_contiguous(1, bytes, dtypes().byte, p.device);
    p.workspace = workspace.mutable_data_ptr();
    if (prepared.drops()) return kernels.backward_dropping(&p, &prepared.dropout, stream);
    return kernels.backward(&p, stream);
  };
  if (prepared.generation == 0 && is_short(p)) {
    const cudaError_t error = prepared.launch_first([&](const Kernels& kernels) {
      return kernels.generation >= 90 ? int{cudaErrorNotSupported} : launch_on(kernels);
    });
    if (error != cudaErrorNotSupported) return error;
  }
  return prepared.launch_first(launch_on);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cuda_backward(
    const std::optional<Tensor>& dout, const std::optional<Tensor>& dlse, const Tensor& q,
    const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& cu_seqlens_q,
    const std::optional<Tensor>& cu_seqlens_k, const Tensor& out, const Tensor& lse,
    int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, double softcap, int64_t window_left,
    int64_t window_right, bool lower_right, bool tf32, bool deterministic, int64_t generation,
    int64_t need, bool weighted, bool slopes, bool caps_bias,
    const std::optional<Tensor>& dropout_seed, double dropout_p,
    const std::optional<Tensor>& bias_offsets) {
  const Options options{max_seqlen_q, max_seqlen_k,  scale,       softcap,
                        window_left,  window_right,  lower_right, tf32,
                        weighted,     slopes,        caps_bias,   generation,
                        false,        &dropout_seed, dropout_p,   &bias_offsets};
  const Call call(q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, options);
  Backward prepared = prepare(call, dout, dlse, out, lse, deterministic);
  FlashsciBackwardParams& p = prepared.params;
  p.out = address_of(out);
  if (dout.has_value()) p.dout = address_of(*dout);
  if (dlse.has_value()) p.dlse = static_cast<const float*>(address_of(*dlse));

  const OnDevice on_device(call.device);
  // Kernels read lse as one block; vmap gives it expanded, others sliced.
  std::optional<Tensor> copied;
  if (!is_contiguous(lse) && !rehearsing()) copied = torch::stable::contiguous(lse);
  p.lse = static_cast<const float*>(address_of(copied.has_value() ? *copied : lse));
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
  const int32_t bias_dtype = bias.has_value() ? dtype_of(*bias) : call.dtype;
  const int64_t none[] = {0};
  Tensor dbias = empty_contiguous(1, none, bias_dtype, call.device);
  const auto write_to = [&](Tensor made) {
    dbias = std::move(made);
    p.dbias = dbias.mutable_data_ptr();
    p.dbias_strides = call.bias.has_value() && call.cu_seqlens_q.has_value()
                          ? ragged_strides(dbias)
                          : View(dbias).pair_strides();
  };
  const auto write_row_major = [&] {
    if (need_bias)
      write_to(slopes ? empty_slope_sums(lse, call) : empty_bias_gradient(*bias, call));
  };
  // Without a score every gradient is zero, also that of a bias that the batch shares: no kernel
  // has a block that would write it.
  if (call.rows() == 0 || call.k_view.size[3] == 0) {
    write_row_major();
    for (Tensor* made : {&dq, &dk, &dv, &dbias})
      if (made->numel() != 0 && !rehearsing()) torch::stable::zero_(*made);
  } else {
    void* stream = current_stream(call.device);
    cudaError_t error = cudaErrorNotSupported;
    if (need_bias && !slopes && takes_pairs(Prepared<FlashsciForwardParams>(call))) {
      write_to(empty_in_order(*bias, bias_dtype, call.device));
      error = launch(prepared, p, stream);
    }
    if (error == cudaErrorNotSupported) {
      write_row_major();
      error = launch(prepared, p, stream);
    }
    call.require("backward", error);
  }
  return {std::move(dq), std::move(dk), std::move(dv), std::move(dbias)};
}

// The kernels that the op above would launch, as `rehearse` names them.
std::string cuda_backward_kernels(
    const std::optional<Tensor>& dout, const std::optional<Tensor>& dlse, const Tensor& q,
    const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& cu_seqlens_q,
    const std::optional<Tensor>& cu_seqlens_k, const Tensor& out, const Tensor& lse,
    int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, double softcap, int64_t window_left,
    int64_t window_right, bool lower_right, bool tf32, bool deterministic, int64_t generation,
    int64_t need, bool weighted, int64_t capability, int64_t processors, int64_t shared_per_sm,
    int64_t shared_per_block, bool slopes, bool caps_bias,
    const std::optional<Tensor>& dropout_seed, double dropout_p,
    const std::optional<Tensor>& bias_offsets) {
  return rehearse(capability, processors, shared_per_sm, shared_per_block, [&] {
    cuda_backward(dout, dlse, q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, out, lse,
                  max_seqlen_q, max_seqlen_k, scale, softcap, window_left, window_right,
                  lower_right, tf32, deterministic, generation, need, weighted, slopes, caps_bias,
                  dropout_seed, dropout_p, bias_offsets);
  });
}

// A gradient as Python allocated it: shape and dtype of `like`.
View check_like(const Tensor& x, const Tensor& like, const char* name) {
  FLASHSCI_CHECK(x.is_cuda() && x.get_device_index() == like.get_device_index() &&
                     dtype_of(x) == dtype_of(like) && x.dim() == like.dim(),
                 name, " must be on the device of what it is a gradient of, with its dtype");
  const View view(x), other(like);
  for (int i = 0; i < kMaxRank; ++i)
    FLASHSCI_CHECK(view.size[i] == other.size[i], name, " has shape ", shape_of(x), ", not ",
                   shape_of(like));
  return view;
}

// A gradient of q, k or v: its last dim is contiguous.
View check_gradient(const Tensor& x, const Tensor& like, const char* name) {
  const View view = check_like(x, like, name);
  FLASHSCI_CHECK(view.stride[4] == 1 || view.size[4] == 1, "the last dim of ", name,
                 " must be contiguous");
  return view;
}

View check_pairs(const Tensor& x, const Tensor& like, const Call& call) {
  const View view = check_like(x, like, "dbias");
  FLASHSCI_CHECK(is_contiguous(x) || view.stride[2] == 1 || has_pitch(x, call),
                 "dbias must be contiguous, or its heads neighbours, or without a window have rows "
                 "of whole 16 bytes");
  return view;
}

// A Backward for all calls of these shapes, strides and options, none of them empty. `lse` is
// contiguous, and so is `dbias` unless its heads are neighbours, for kernels that take that layout,
// or its rows are whole 16 bytes.
Tensor cuda_prepared_backward(const std::optional<Tensor>& dout, const std::optional<Tensor>& dlse,
                              const Tensor& q, const Tensor& k, const Tensor& v,
                              const std::optional<Tensor>& bias, const std::optional<Tensor>& mask,
                              const std::optional<Tensor>& cu_seqlens_q,
                              const std::optional<Tensor>& cu_seqlens_k, const Tensor& out,
                              const Tensor& lse, const std::optional<Tensor>& dq,
                              const std::optional<Tensor>& dk, const std::optional<Tensor>& dv,
                              const std::optional<Tensor>& dbias, int64_t max_seqlen_q,
                              int64_t max_seqlen_k, double scale, double softcap,
                              int64_t window_left, int64_t window_right, bool lower_right,
                              bool tf32, bool deterministic, int64_t generation, bool weighted,
                              bool slopes, bool caps_bias) {
  const Options options{max_seqlen_q, max_seqlen_k, scale,    softcap, window_left, window_right,
                        lower_right,  tf32,         weighted, slopes,  caps_bias,   generation};
  const Call call(q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, options);
  Backward prepared = prepare(call, dout, dlse, out, lse, deterministic);
  FlashsciBackwardParams& p = prepared.params;
  FLASHSCI_CHECK(is_contiguous(lse), "lse must be contiguous");
  if (dq.has_value()) p.dq_strides = check_gradient(*dq, q, "dq").strides();
  if (dk.has_value()) p.dk_strides = check_gradient(*dk, k, "dk").strides();
  if (dv.has_value()) p.dv_strides = check_gradient(*dv, v, "dv").strides();
  if (dbias.has_value()) {
    FLASHSCI_CHECK(bias.has_value() && !slopes,
                   "dbias without a bias; cuda_backward has the gradient of alibi_slopes");
    p.dbias_strides = check_pairs(*dbias, *bias, call).pair_strides();
  }
  return kept_by_python(prepared);
}

}  // namespace

extern "C" FLASHSCI_API int flashsci_run_backward(const void* prepared, const void* dout,
                                                  const void* dlse, const void* q, const void* k,
                                                  const void* v, const void* bias, const void* mask,
                                                  const void* cu_seqlens_q,
                                                  const void* cu_seqlens_k, const void* out,
                                                  const void* lse, void* dq, void* dk, void* dv,
                                                  void* dbias, void* stream) {
  const Backward& backward = *static_cast<const Backward*>(prepared);
  FlashsciBackwardParams p = backward.params;
  p.dout = dout;
  p.dlse = static_cast<const float*>(dlse);
  p.q = q;
  p.k = k;
  p.v = v;
  p.bias_mask.bias = bias;
  p.bias_mask.mask = static_cast<const uint8_t*>(mask);
  p.cu_seqlens_q = static_cast<const int32_t*>(cu_seqlens_q);
  p.cu_seqlens_k = static_cast<const int32_t*>(cu_seqlens_k);
  p.out = out;
  p.lse = static_cast<const float*>(lse);
  p.dq = dq;
  p.dk = dk;
  p.dv = dv;
  p.dbias = dbias;
  return succeeds(p.device, [&] { return launch(backward, p, stream); });
}

STABLE_TORCH_LIBRARY_IMPL(flashsci, CUDA, m) {
  m.impl("cuda_backward", TORCH_BOX(&cuda_backward));
  m.impl("cuda_prepared_backward", TORCH_BOX(&cuda_prepared_backward));
}

STABLE_TORCH_LIBRARY_IMPL(flashsci, CompositeExplicitAutograd, m) {
  m.impl("cuda_backward_kernels", TORCH_BOX(&cuda_backward_kernels));
}
