// The one definition of the namespace `flashsci` from C++: schemas of the ops that CUDA implements.
#include <torch/csrc/stable/library.h>

#include <string>

#include "../include/flashsci.h"
#include "stream.h"

namespace {

std::string build_info() { return flashsci_build_info(); }

// Whether the running torch has CUDA streams (false under CPU builds of torch).
bool sees_torch_cuda() { return aoti_torch_get_current_cuda_stream != nullptr; }

}  // namespace

STABLE_TORCH_LIBRARY(flashsci, m) {
  m.def("build_info() -> str");
  m.def("sees_torch_cuda() -> bool");
#define TENSORS                                                                              \
  "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? cu_seqlens_q, Tensor? " \
  "cu_seqlens_k, "
#define SCALARS                                                                                \
  "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, float softcap, SymInt window_left, " \
  "SymInt window_right, bool lower_right, bool tf32, "
  // weighted: `bias` holds weights of keys instead of biases, and `dbias` is their gradient. slopes:
  // it holds slopes of ALiBi. caps_bias: the softcap bounds scores with either. bias_offsets: the
  // starts of the blocks of a packed bias per pair.
#define KINDS_OF_BIAS "bool slopes=False, bool caps_bias=False"
#define FEATURES \
  KINDS_OF_BIAS ", Tensor? dropout_seed=None, float dropout_p=0.0, Tensor? bias_offsets=None"
  m.def("cuda_forward(" TENSORS SCALARS "int generation, bool weighted=False, " FEATURES
        ") -> (Tensor out, Tensor lse)");
  m.def("cuda_backward(Tensor? dout, Tensor? dlse, " TENSORS "Tensor out, Tensor lse, " SCALARS
        "bool deterministic, int generation, int need, bool weighted=False, " FEATURES
        ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)");
  // The kernels that these ops would launch on a device of a compute capability (90 for 9.0), as
  // lines of "sm90/fwd/forward_kernel". Tensors may be on any device, also on "meta": nothing is
  // launched or written.
#define DESCRIBED "int capability, int processors, int shared_per_sm, int shared_per_block"
#define DEVICE DESCRIBED ") -> str"
#define DEVICE_AND_OPTIONS DESCRIBED ", " FEATURES ") -> str"
  m.def("cuda_forward_kernels(" TENSORS SCALARS
        "int generation, bool weighted, " DEVICE_AND_OPTIONS);
  m.def("cuda_backward_kernels(Tensor? dout, Tensor? dlse, " TENSORS
        "Tensor out, Tensor lse, " SCALARS
        "bool deterministic, int generation, int need, bool weighted, " DEVICE_AND_OPTIONS);
  // The prepared launches that later calls of equal shapes, strides and options give to
  // flashsci_run_forward and flashsci_run_backward, which bypass torch; out, lse and gradients have
  // the layout of those calls.
  m.def("cuda_prepared_forward(" TENSORS "Tensor out, " SCALARS
        "int generation, bool weighted=False, " KINDS_OF_BIAS ") -> Tensor");
  m.def("cuda_prepared_backward(Tensor? dout, Tensor? dlse, " TENSORS
        "Tensor out, Tensor lse, Tensor? dq, Tensor? dk, Tensor? dv, Tensor? dbias, " SCALARS
        "bool deterministic, int generation, bool weighted=False, " KINDS_OF_BIAS ") -> Tensor");
#define FP8                                                                                      \
  "Tensor q, Tensor k, Tensor v, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, Tensor? "    \
  "cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, "  \
  "float softcap, SymInt window_left, SymInt window_right, bool lower_right, bool out_is_fp16, " \
  "bool fast"
  m.def("cuda_fp8_forward(" FP8 ") -> (Tensor out, Tensor lse)");
  m.def("cuda_fp8_forward_kernels(" FP8 ", " DEVICE);
  // The schema of flashsci/call/paged_ops.py for other backends, plus the generation.
#define PAGED(out)                                                                           \
  "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seqused_k, Tensor "  \
  "cu_seqlens_q, Tensor? sink, Tensor? k_scale, Tensor? v_scale, " out                       \
  ", int max_seqlen_q, float scale, float softcap, int window_left, int window_right, bool " \
  "return_lse, int generation"
  m.def("cuda_paged_attention(" PAGED("Tensor(a!) out") ") -> Tensor");
  m.def("cuda_paged_attention_kernels(" PAGED("Tensor out") ", " DEVICE);
}

STABLE_TORCH_LIBRARY_IMPL(flashsci, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&build_info));
  m.impl("sees_torch_cuda", TORCH_BOX(&sees_torch_cuda));
}
