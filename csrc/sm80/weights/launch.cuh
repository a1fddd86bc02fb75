// The host side of calls with key weights: the launchers of the same calls with a bias, around which
// there are logarithms before and the gradient of the weights after.
#pragma once
#include "../../include/flashsci_small.h"
#include "gradient.cuh"

namespace flashsci::sm80::weights {

// csrc/sm80/fwd and csrc/sm80/bwd, or those of fp32.
using Forward = int (*)(const FlashsciForwardParams*, FlashsciStream);
struct Backward {
  int (*launch)(const FlashsciBackwardParams*, FlashsciStream);
  int64_t (*workspace)(const FlashsciBackwardParams*);
};

// Whether a call is one of dense tensors with weights.
template <class Params>
bool has_weights(const Params& p) {
  return p.bias_mask.bias_is_fp32 == FLASHSCI_KEY_WEIGHTS && p.cu_seqlens_q == nullptr;
}
inline int64_t bytes_of(int64_t count) { return (count * 4 + 255) / 256 * 256; }

inline int64_t forward_workspace(const FlashsciForwardParams& p) {
  return has_weights(p) ? bytes_of(plan_logs(p).count) : 0;
}

inline int launch_forward(const FlashsciForwardParams& p, Forward forward, FlashsciStream stream) {
  if (!has_weights(p)) return cudaErrorNotSupported;
  FlashsciForwardParams biased = p;
  const cudaError_t error =
      take_logs(biased, p, 0.f, p.workspace, static_cast<cudaStream_t>(stream));
  return error != cudaSuccess ? error : forward(&biased, stream);
}

// The two calls of a backward, and the workspace: logarithms of either, sums, that of either call.
struct BackwardWork {
  FlashsciBackwardParams rows, sums;  // dq, dk and dv; those of the gradient
  GradientPlan gradient;
  int64_t logs_bytes, sums_bytes, biased_bytes;

  BackwardWork(const FlashsciBackwardParams& p, const Backward& backward)
      : rows(p), sums(p), gradient(p) {
    rows.dbias = nullptr;
    sums.dq = sums.dk = sums.dv = nullptr;
    sums.dbias_strides = gradient.sum_strides();
    // As take_logs will have it.
    rows.bias_mask.bias_is_fp32 = sums.bias_mask.bias_is_fp32 = 1;
    logs_bytes = bytes_of(plan_logs(p).count);
    sums_bytes = wants_gradient() ? bytes_of(gradient.count * gradient.group) : 0;
    biased_bytes = wants_rows() ? backward.workspace(&rows) : 0;
    if (wants_gradient()) biased_bytes = std::max(biased_bytes, backward.workspace(&sums));
  }
  bool wants_rows() const { return rows.dq != nullptr || rows.dk != nullptr || rows.dv != nullptr; }
  bool wants_gradient() const { return sums.dbias != nullptr; }
};

inline int64_t backward_workspace(const FlashsciBackwardParams& p, const Backward& backward) {
  if (!has_weights(p)) return 0;
  const BackwardWork work(p, backward);
  return work.logs_bytes + work.sums_bytes + work.biased_bytes;
}

inline int launch_backward(const FlashsciBackwardParams& p, const Backward& backward,
                           FlashsciStream stream) {
  if (!has_weights(p)) return cudaErrorNotSupported;
  const auto on = static_cast<cudaStream_t>(stream);
  BackwardWork work(p, backward);
  auto* memory = static_cast<unsigned char*>(p.workspace);
  auto* sums = reinterpret_cast<float*>(memory + work.logs_bytes);
  work.rows.workspace = work.sums.workspace = memory + work.logs_bytes + work.sums_bytes;
  int error = cudaSuccess;
  if (work.wants_rows()) {
    error = take_logs(work.rows, p, 0.f, memory, on);
    if (error == cudaSuccess) error = backward.launch(&work.rows, stream);
  }
  if (error != cudaSuccess || !work.wants_gradient() || work.gradient.count == 0) return error;
  work.sums.dbias = sums, work.gradient.sums = sums;
  error = take_logs(work.sums, p, kLeast, memory, on);
  if (error == cudaSuccess) error = backward.launch(&work.sums, stream);
  if (error != cudaSuccess) return error;
  return launch<weight_gradient_kernel>(blocks_of(work.gradient.count), 256, 0, p.device, on,
                                        work.gradient);
}

}  // namespace flashsci::sm80::weights
