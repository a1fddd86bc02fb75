// The fp32 backward of calls with key weights: that of the same call with their logarithms as a
// bias, and the gradient of the weights.
#pragma once
#include "../bwd_fp32/launch.cuh"
#include "limits.cuh"

namespace flashsci::sm80::weights {

// As WeightedWork (backward.cuh).
template <class Bias>
struct WeightedFp32Work {
  FlashsciBackwardParams biased;  // without dbias
  int64_t logs_bytes, statistics_bytes, sums_bytes;
  bwd_fp32::BiasFp32Plan sums{};

  explicit WeightedFp32Work(const FlashsciBackwardParams& p) : biased(p) {
    biased.dbias = nullptr;
    logs_bytes = bytes_of_logs(p);
    statistics_bytes = bwd_fp32::plan_work<Bias>(biased).statistics_bytes;
    if (p.dbias != nullptr) {
      sums = {plan_bias_tiles(p, Bias::kBlockRows, Bias::kBlockColumns), nullptr};
      own_by_key_heads(sums, p);
      sums.splits = splits_for_any_device(sums);
    }
    sums_bytes = sums.splits > 1 ? sums.splits * sums.elements * int64_t{4} : 0;
  }
  int64_t bytes() const { return logs_bytes + statistics_bytes + sums_bytes; }
};

template <class Keys, class Queries, class Bias>
cudaError_t launch_weighted_tiles(const FlashsciBackwardParams& p, cudaStream_t stream) {
  if (p.seq_q == 0 || p.seq_k == 0 || p.cu_seqlens_q != nullptr) return cudaErrorInvalidValue;
  WeightedFp32Work<Bias> work(p);
  auto* memory = static_cast<unsigned char*>(p.workspace);
  FlashsciBackwardParams& biased = work.biased;
  biased.workspace = memory + work.logs_bytes;
  const bool rows = p.dq != nullptr || p.dk != nullptr || p.dv != nullptr;
  cudaError_t error = cudaSuccess;
  if (rows) error = take_logs<Bias>(biased, memory, stream);
  if (error == cudaSuccess && rows)
    error = bwd_fp32::launch_backward_tiles<Keys, Queries, Bias>(biased, stream);
  if (error != cudaSuccess || p.dbias == nullptr) return error;

  bwd_fp32::BackwardFp32Plan plan{};
  plan.statistics = static_cast<float2*>(biased.workspace);
  plan.vector = p.copy_bytes == 16 && (p.head_dim | p.head_dim_v) % 4 == 0;
  plan.inner = p.softcap != 0.f ? p.scale / p.softcap : p.scale;
  plan.cap = p.softcap;
  if (!rows) error = bwd_fp32::launch_statistics(p, plan, stream);
  if (error != cudaSuccess) return error;
  FlashsciBackwardParams bare = p;
  bare.bias_mask.bias = nullptr;
  plan.bias_mask = BiasMaskAccess::of(bare.bias_mask, p.seq_k);
  work.sums.sums = reinterpret_cast<float*>(memory + work.logs_bytes + work.statistics_bytes);
  const KeyWeights of{static_cast<const float*>(p.bias_mask.bias), p.bias_mask.bias_strides};
  return bwd_fp32::launch_bias<Bias>(bare, plan, work.sums, stream, of);
}

}  // namespace flashsci::sm80::weights
