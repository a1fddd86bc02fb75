// The backward of calls with key weights: that of the same call with their logarithms as a bias,
// and the gradient of the weights.
#pragma once
#include "../bwd/launch.cuh"
#include "limits.cuh"

namespace flashsci::sm80::weights {

using namespace bwd;

// The workspace: logarithms, then that of the call with a bias, which begins with the statistics,
// then partial sums of the gradient.
template <int kHeadDim>
struct WeightedWork {
  FlashsciBackwardParams biased;  // without dbias
  int64_t logs_bytes, biased_bytes, sums_bytes;
  BiasPlan sums;

  explicit WeightedWork(const FlashsciBackwardParams& p) : biased(p) {
    biased.dbias = nullptr;
    logs_bytes = bytes_of_logs(p);
    biased_bytes = plan_work<kHeadDim>(biased).bytes();
    sums = p.dbias != nullptr ? plan_bias<kHeadDim>(p) : BiasPlan{};
    sums_bytes = sums.splits > 1 ? sums.splits * sums.elements * int64_t{4} : 0;
  }
  int64_t bytes() const { return logs_bytes + biased_bytes + sums_bytes; }
};

// statistics: whether they are not there yet.
template <class Op, int kHeadDim>
cudaError_t launch_weight_gradient(const FlashsciBackwardParams& p, const BiasPlan& sums,
                                   void* statistics, float* partial, bool no_statistics,
                                   cudaStream_t stream) {
  using C = BiasTiles<kHeadDim>;
  BackwardPlan plan{};
  plan.statistics = static_cast<float2*>(statistics);
  plan.bias_sums = partial;
  plan.group = p.heads_q / p.heads_k;
  plan.scores = plan_scores(p.scale, p.softcap, p.scale > 0.f);
  plan.bias_factor = 1.f;
  plan.vector =
      p.copy_bytes >= 16 && p.head_dim % kChunkElements == 0 && p.head_dim_v % kChunkElements == 0;
  cudaError_t error = cudaSuccess;
  if (no_statistics) error = launch_statistics<Op>(p, plan, 0, stream);
  if (error != cudaSuccess) return error;
  const KeyWeights of{static_cast<const float*>(p.bias_mask.bias), p.bias_mask.bias_strides};
  return launch_bias<Op, kHeadDim>(p, plan, sums, stream, of);
}

template <class Op, int kHeadDim>
cudaError_t launch_weighted(const FlashsciBackwardParams& p, cudaStream_t stream) {
  WeightedWork<kHeadDim> work(p);
  if (p.seq_q == 0 || p.seq_k == 0 || p.cu_seqlens_q != nullptr) return cudaErrorInvalidValue;
  auto* memory = static_cast<unsigned char*>(p.workspace);
  FlashsciBackwardParams& biased = work.biased;
  biased.workspace = memory + work.logs_bytes;
  const bool rows = p.dq != nullptr || p.dk != nullptr || p.dv != nullptr;
  cudaError_t error = cudaSuccess;
  if (rows) error = take_logs<Op>(biased, memory, stream);
  if (error == cudaSuccess && rows) error = launch_padded<Op, kHeadDim>(biased, stream);
  if (error != cudaSuccess || p.dbias == nullptr) return error;
  auto* partial = reinterpret_cast<float*>(memory + work.logs_bytes + work.biased_bytes);
  return launch_weight_gradient<Op, kHeadDim>(p, work.sums, biased.workspace, partial, !rows,
                                              stream);
}

// Any call without dropout.
template <class Op>
cudaError_t launch_any_backward(const FlashsciBackwardParams& p, cudaStream_t stream) {
  if (!has_weights(p.bias_mask)) return launch_backward<Op>(p, stream);
  if (std::max(p.head_dim, p.head_dim_v) > FLASHSCI_MAX_HEAD_DIM) return cudaErrorInvalidValue;
  return with_padded_dim(
      p, [&](auto dim) { return launch_weighted<Op, decltype(dim)::value>(p, stream); });
}

inline int64_t any_workspace(const FlashsciBackwardParams& p) {
  if (!has_weights(p.bias_mask)) return backward_workspace(p);
  return with_padded_dim(p,
                         [&](auto dim) { return WeightedWork<decltype(dim)::value>(p).bytes(); });
}

}  // namespace flashsci::sm80::weights
