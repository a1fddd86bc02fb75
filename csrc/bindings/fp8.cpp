// flashsci::cuda_fp8_forward: attention on 8-bit floats, from the tensors and their scales to the
// launch. The shapes of scales: flashsci/call/fp8_ops.py.
#include <tuple>

#include "../include/flashsci_fp8.h"
#include "call.h"

namespace {

using namespace flashsci::bindings;

// log2 of the rows that share one of `count` scales of `rows` rows; 0: no block size fits.
// sequences: -1 for dense.
int shift_of(int64_t count, int64_t rows, int64_t sequences) {
  if (sequences >= 0 && count == sequences) return FLASHSCI_ONE_SCALE;
  for (const int shift : {7, 6}) {
    const int64_t last = (int64_t{1} << shift) - 1;
    if (count == (sequences >= 0 ? (rows >> shift) + sequences : (rows + last) >> shift))
      return shift;
  }
  return 0;
}

// The scale of q, k or v: one number, [..., H] or [..., H, blocks] of a dense tensor, [N, H] or
// [slots, H] of a packed one.
FlashsciScales describe_scale(const std::optional<Tensor>& given, const char* name, const Tensor& x,
                              const Call& call) {
  FlashsciScales scales{};
  scales.shift = FLASHSCI_ONE_SCALE;
  if (!given.has_value()) return scales;
  const Tensor& scale = *given;
  FLASHSCI_CHECK(is_on(scale, call.device), name, " must be on the device of q");
  FLASHSCI_CHECK(dtype_of(scale) == dtypes().single, name, " must be float32");
  scales.data = static_cast<const float*>(address_of(scale));
  const int rank = static_cast<int>(scale.dim()), rank_x = static_cast<int>(x.dim());
  if (rank == 0) return scales;
  const auto fits = [&](bool right) {
    FLASHSCI_CHECK(right, name, " of shape ", shape_of(scale), " does not fit a tensor of shape ",
                   shape_of(x));
  };
  const int64_t rows = x.size(rank_x - 2);
  if (call.cu_seqlens_q.has_value()) {
    fits(rank == 2 && scale.size(1) == x.size(0));
    scales.shift = shift_of(scale.size(0), rows, call.num_seqs);
    fits(scales.shift != 0);
    scales.slots = scales.shift != FLASHSCI_ONE_SCALE;
    scales.head = scale.stride(1);
    (scales.slots ? scales.block : scales.sequence) = scale.stride(0);
    return scales;
  }
  const bool blocks = rank == rank_x - 1;
  fits(blocks || rank == rank_x - 2);
  const int outer = rank - blocks;  // leading dims and heads, as x has them
  for (int i = 0; i < outer; ++i) fits(scale.size(i) == x.size(i));
  int64_t* strides[] = {&scales.head, &scales.batch1, &scales.batch0};
  for (int i = 0; i < outer; ++i) *strides[outer - 1 - i] = scale.stride(i);
  if (blocks) {
    scales.shift = shift_of(scale.size(rank - 1), rows, -1);
    fits(scales.shift != 0);
    scales.block = scale.stride(rank - 1);
  }
  return scales;
}

// The kernel's launcher in this build; raises if there is none.
int launch(const FlashsciFp8ForwardParams& p, const Call& call) {
#ifdef FLASHSCI_HAVE_SM90_FP8_E4M3
  if (describe(call.device).capability / 10 != 9) return cudaErrorNotSupported;
  FlashsciFp8ForwardParams params = p;
  const int64_t bytes[] = {flashsci_forward_sm90_e4m3_workspace(&params)};
  void* stream = current_stream(call.device);
  if (bytes[0] == 0) return flashsci_forward_sm90_e4m3(&params, stream);
  Tensor workspace = empty_contiguous(1, bytes, dtypes().byte, call.device);
  params.call.workspace = workspace.mutable_data_ptr();
  return flashsci_forward_sm90_e4m3(&params, stream);
#else
  (void)p, (void)call;
  return cudaErrorNotSupported;
#endif
}

std::tuple<Tensor, Tensor> cuda_fp8_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& q_scale,
    const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
    const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, double softcap, int64_t window_left,
    int64_t window_right, bool lower_right, bool out_is_fp16, bool fast) {
  const Options options{max_seqlen_q, max_seqlen_k, scale, softcap, window_left,
                        window_right, lower_right,  false, false,   false,
                        false,        90,           true};
  const std::optional<Tensor> none;
  const Call call(q, k, v, none, none, cu_seqlens_q, cu_seqlens_k, options);
  const int rank = static_cast<int>(q.dim());
  FLASHSCI_CHECK(rank <= 5, "q, k and v have at most five dims: ", call.shapes());
  FlashsciFp8ForwardParams p{};
  p.q_scale = describe_scale(q_scale, "q_scale", q, call);
  p.k_scale = describe_scale(k_scale, "k_scale", k, call);
  p.v_scale = describe_scale(v_scale, "v_scale", v, call);
  p.out_is_fp16 = out_is_fp16, p.fast = fast;

  const OnDevice on_device(call.device);
  Tensor out = empty_like_layout(q, call.v_view.size[4],
                                 out_is_fp16 ? dtypes().half : dtypes().brain, call.device);
  Tensor lse = empty_contiguous(rank - 1, q.sizes().data(), dtypes().single, call.device);
  if (call.rows() == 0 || call.k_view.size[3] == 0) {  // no query, or none that sees a key
    if (call.rows() != 0 && !rehearsing()) {
      torch::stable::zero_(out);
      torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    }
    return {std::move(out), std::move(lse)};
  }
  call.describe_in(p.call);
  p.call.out = out.mutable_data_ptr();
  p.call.out_strides = View(out).strides();
  p.call.lse = static_cast<float*>(lse.mutable_data_ptr());
  p.call.copy_bytes = alignment_of(call.stride_bits(), p.call.q, p.call.k, p.call.v);
  const auto error = static_cast<cudaError_t>(launch(p, call));
  FLASHSCI_CHECK(error != cudaErrorNotSupported,
                 "no float8_e4m3fn kernel serves this call on compute capability ",
                 describe(call.device).capability / 10.0, " in this build (", flashsci_build_info(),
                 "): it is for Hopper, rows of q, k and v begin at ",
                 "multiples of 16 bytes, head dims of v are multiples of 8: ", call.shapes(),
                 "; use backend=\"triton\"");
  FLASHSCI_CHECK(error == cudaSuccess, "fp8 forward: launch failed: ", cudaGetErrorName(error),
                 " (", cudaGetErrorString(error), ") for ", call.shapes(), "; built as ",
                 flashsci_build_info());
  return {std::move(out), std::move(lse)};
}

// The kernels that the op above would launch, as `rehearse` names them.
std::string cuda_fp8_forward_kernels(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& q_scale,
    const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
    const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, double softcap, int64_t window_left,
    int64_t window_right, bool lower_right, bool out_is_fp16, bool fast, int64_t capability,
    int64_t processors, int64_t shared_per_sm, int64_t shared_per_block) {
  return rehearse(capability, processors, shared_per_sm, shared_per_block, [&] {
    cuda_fp8_forward(q, k, v, q_scale, k_scale, v_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                     max_seqlen_k, scale, softcap, window_left, window_right, lower_right,
                     out_is_fp16, fast);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flashsci, CUDA, m) {
  m.impl("cuda_fp8_forward", TORCH_BOX(&cuda_fp8_forward));
}

STABLE_TORCH_LIBRARY_IMPL(flashsci, CompositeExplicitAutograd, m) {
  m.impl("cuda_fp8_forward_kernels", TORCH_BOX(&cuda_fp8_forward_kernels));
}
