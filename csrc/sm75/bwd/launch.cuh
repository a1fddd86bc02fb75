// The host side of the Turing backward: the kernels of a call, their tiles, and their workspace.
//
//     statistics               always
//     backward_keys_kernel     dk and dv
//     backward_queries_kernel  dq, and dbias if it has an element for every pair
//     bias_gradient_kernel     dbias of a shared bias, or behind a softcap
//
// Every sum has one owner: calls are bitwise equal from run to run, also if that is not asked for.
#pragma once
#include <algorithm>

#include "../../core/launch.cuh"
#include "../../core/score_mod.cuh"
#include "../dbias/kernel.cuh"
#include "dq_kernel.cuh"
#include "preprocess.cuh"

namespace flashsci::sm75::bwd {

using namespace dbias;

inline constexpr int kMaxBackwardDim = 128;

// Tile shapes of a padded head dimension: docs/develop/kernels/sm75.md. AnyQueries: with bias or
// mask, or rows of any alignment, which take registers.
template <int kHeadDim>
struct BackwardShapes;
template <>
struct BackwardShapes<32> {
  using Keys = KeyTiling<32, 128, 32, 2, 4, 2>;
  using Queries = QueryTiling<32, 128, 32, 4, 2>;
  using AnyQueries = QueryTiling<32, 64, 32, 4, 2>;
  using Bias = BiasTiling<32, 64, 64, 2>;
};
template <>
struct BackwardShapes<64> {
  using Keys = KeyTiling<64, 64, 32, 2, 4, 3>;
  using Queries = QueryTiling<64, 128, 32, 4, 2>;
  using AnyQueries = QueryTiling<64, 64, 32, 4, 2>;
  using Bias = BiasTiling<64, 64, 64, 2>;
};
template <>
struct BackwardShapes<96> {
  using Keys = KeyTiling<96, 64, 32, 2, 4, 2>;
  using Queries = QueryTiling<96, 64, 32, 4, 2>;
  using AnyQueries = Queries;
  using Bias = BiasTiling<96, 64, 32, 1>;
};
template <>
struct BackwardShapes<128> {
  using Keys = KeyTiling<128, 128, 32, 2, 8, 1>;
  using Queries = QueryTiling<128, 128, 32, 8, 1>;
  using AnyQueries = Queries;
  using Bias = BiasTiling<128, 64, 32, 1>;
};

// The plan of one call, before any pointer into the workspace is known.
struct BackwardWork {
  bool keys, queries, writes_bias, bias;
  BiasPlan bias_plan;
  int64_t statistics_bytes, bias_bytes;  // of the workspace
  int64_t bytes() const { return statistics_bytes + bias_bytes; }
};

template <int kHeadDim>
BackwardWork plan_work(const FlashsciBackwardParams& p) {
  BackwardWork work{};
  const auto rounded = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  work.keys = p.dk != nullptr || p.dv != nullptr;
  if (p.dbias != nullptr) {
    using Bias = typename BackwardShapes<kHeadDim>::Bias;
    work.bias_plan = plan_bias_tiles(p, Bias::kBlockQ, Bias::kBlockK);
    work.bias_plan.splits = splits_for_any_device(work.bias_plan);
    work.writes_bias = work.bias_plan.shared == 0 && p.softcap == 0.f;
    work.bias = !work.writes_bias;
    if (work.bias && work.bias_plan.splits > 1)
      work.bias_bytes = rounded(work.bias_plan.splits * work.bias_plan.elements * int64_t{4});
  }
  work.queries = p.dq != nullptr || work.writes_bias;
  work.statistics_bytes =
      rounded(p.batch0 * p.batch1 * p.heads_q * p.seq_q * static_cast<int64_t>(sizeof(float2)));
  return work;
}

template <class C>
constexpr bool fits(size_t bytes) {
  return C::kMinBlocks * bytes <= 64 * 1024 && C::kMinBlocks * C::kThreads <= 1024;
}

template <class Op, class C, bool kAny>
cudaError_t launch_keys(const FlashsciBackwardParams& p, const BackwardPlan& plan,
                        cudaStream_t stream) {
  static_assert(fits<C>(sizeof(KeyStorage<C>)), "the CTAs of an SM of Turing");
  const int64_t tiles = num_tiles(p.seq_k, C::kBlockK, p.num_seqs, p.cu_seqlens_q != nullptr);
  return launch<backward_keys_kernel<Op, C, kAny>>(tiles * p.heads_k * p.batch0 * p.batch1,
                                                   C::kThreads, sizeof(KeyStorage<C>), p.device,
                                                   stream, p, plan, static_cast<uint32_t>(tiles));
}

template <class Op, class C, bool kAny>
cudaError_t launch_queries(const FlashsciBackwardParams& p, const BackwardPlan& plan,
                           cudaStream_t stream) {
  static_assert(fits<C>(sizeof(QueryStorage<C>)), "the CTAs of an SM of Turing");
  const int64_t tiles = num_tiles(p.seq_q, C::kBlockQ, p.num_seqs, p.cu_seqlens_q != nullptr);
  return launch<backward_queries_kernel<Op, C, kAny>>(
      tiles * p.heads_q * p.batch0 * p.batch1, C::kThreads, sizeof(QueryStorage<C>), p.device,
      stream, p, plan, static_cast<uint32_t>(tiles));
}

template <class Op, class C>
cudaError_t launch_bias(const FlashsciBackwardParams& p, const BackwardPlan& plan,
                        const BiasPlan& bias, cudaStream_t stream) {
  static_assert(fits<C>(sizeof(BiasShared<C>)), "the CTAs of an SM of Turing");
  cudaError_t error = launch<bias_gradient_kernel<Op, C>>(
      bias.blocks(), C::kThreads, sizeof(BiasShared<C>), p.device, stream, p, plan, bias);
  if (error == cudaSuccess && bias.splits > 1)
    error = launch<bias_sum_kernel<Op>>(std::min<int64_t>((bias.elements + 255) / 256, 4096), 256,
                                        0, p.device, stream, p, plan, bias.splits, bias.elements);
  return error;
}

template <class Op, int kHeadDim>
cudaError_t launch_padded(const FlashsciBackwardParams& p, cudaStream_t stream) {
  using Shapes = BackwardShapes<kHeadDim>;
  const BackwardWork work = plan_work<kHeadDim>(p);
  const int64_t heads = p.batch0 * p.batch1 * p.heads_q;
  if (heads > INT32_MAX) return cudaErrorInvalidValue;
  BackwardPlan plan{};
  auto* workspace = static_cast<unsigned char*>(p.workspace);
  plan.statistics = reinterpret_cast<float2*>(workspace);
  plan.bias_sums = reinterpret_cast<float*>(workspace + work.statistics_bytes);
  plan.scores = plan_scores(p.scale, p.softcap, p.scale > 0.f && p.bias_mask.bias == nullptr);
  plan.bias_factor = 1.f;
  plan.vector =
      p.copy_bytes >= 16 && p.head_dim % kChunkElements == 0 && p.head_dim_v % kChunkElements == 0;
  plan.vector_dq = takes_vectors(p.dq, p.dq_strides, p.head_dim);
  plan.vector_dk = takes_vectors(p.dk, p.dk_strides, p.head_dim);
  plan.vector_dv = takes_vectors(p.dv, p.dv_strides, p.head_dim_v);
  plan.writes_bias = work.writes_bias;

  const bool windowed = p.window_left >= 0 || p.window_right >= 0;
  if (p.dbias != nullptr && (p.seq_q == 0 || p.seq_k == 0 || (work.writes_bias && windowed))) {
    // Tiles that the window hides are not visited.
    const cudaError_t error =
        clear_memory(p.dbias, work.bias_plan.elements * (p.bias_mask.bias_is_fp32 ? 4 : 2), stream);
    if (error != cudaSuccess) return error;
  }
  if (p.seq_q > 0) {
    int lanes = 4;
    while (lanes * kChunkElements < p.head_dim_v) lanes *= 2;
    const int64_t tiles = (p.seq_q + kRowThreads / lanes - 1) / (kRowThreads / lanes);
    const int vector =
        plan.vector && (p.dout == nullptr || takes_vectors(p.out, p.out_strides, p.head_dim_v));
    const cudaError_t error =
        launch<statistics_kernel<Op>>(tiles * heads, kRowThreads, 0, p.device, stream, p, plan,
                                      static_cast<uint32_t>(tiles), lanes, vector);
    if (error != cudaSuccess) return error;
  }
  const bool any = !plan.vector || p.bias_mask.bias != nullptr || p.bias_mask.mask != nullptr;
  if (work.keys) {
    const cudaError_t error = any ? launch_keys<Op, typename Shapes::Keys, true>(p, plan, stream)
                                  : launch_keys<Op, typename Shapes::Keys, false>(p, plan, stream);
    if (error != cudaSuccess) return error;
  }
  if (work.queries) {
    const cudaError_t error =
        any ? launch_queries<Op, typename Shapes::AnyQueries, true>(p, plan, stream)
            : launch_queries<Op, typename Shapes::Queries, false>(p, plan, stream);
    if (error != cudaSuccess) return error;
  }
  if (work.bias && p.seq_q > 0 && p.seq_k > 0)
    return launch_bias<Op, typename Shapes::Bias>(p, plan, work.bias_plan, stream);
  return cudaSuccess;
}

// Calls `call` with the smallest padded head dim that holds D and Dv.
template <class Call>
auto with_padded_dim(const FlashsciBackwardParams& p, const Call& call) {
  const int dim = std::max(p.head_dim, p.head_dim_v);
  if (dim <= 32) return call(std::integral_constant<int, 32>{});
  if (dim <= 64) return call(std::integral_constant<int, 64>{});
  if (dim <= 96) return call(std::integral_constant<int, 96>{});
  return call(std::integral_constant<int, 128>{});
}

template <class Op>
cudaError_t launch_backward(const FlashsciBackwardParams& p, cudaStream_t stream) {
  const int dim = std::max(p.head_dim, p.head_dim_v);
  if (dim > FLASHSCI_MAX_HEAD_DIM) return cudaErrorInvalidValue;
  if (dim > kMaxBackwardDim) return cudaErrorNotSupported;
  return with_padded_dim(
      p, [&](auto padded) { return launch_padded<Op, decltype(padded)::value>(p, stream); });
}

inline int64_t backward_workspace(const FlashsciBackwardParams& p) {
  return with_padded_dim(
      p, [&](auto padded) { return plan_work<decltype(padded)::value>(p).bytes(); });
}

}  // namespace flashsci::sm75::bwd
