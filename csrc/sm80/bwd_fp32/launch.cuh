// The host side of the fp32 backward: the kernels of a call, their tiles, and their workspace.
//
//     statistics_fp32_kernel            always
//     backward_fp32_kernel, of keys     dk, dv
//     backward_fp32_kernel, of queries  dq, and dbias if it has an element for every pair; without
//                                       dq, the gradient of slopes of ALiBi
//     backward_short_fp32_kernel        these two in one, if keys are few and heads small
//     bias_gradient_fp32_kernel         other dbias
#pragma once
#include <algorithm>

#include "../../core/launch.cuh"
#include "../dbias_fp32/kernel.cuh"
#include "kernel.cuh"
#include "preprocess.cuh"
#include "short_kernel.cuh"

namespace flashsci::sm80::bwd_fp32 {

using namespace dbias_fp32;

// The plan of one call, before any pointer into the workspace is known.
struct BackwardFp32Work {
  bool keys, queries, slopes, bias, writes_bias;
  BiasFp32Plan bias_plan;
  int64_t statistics_bytes, bias_bytes;  // of the workspace
};

template <class Bias>
BackwardFp32Work plan_work(const FlashsciBackwardParams& p) {
  const auto rounded = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  BackwardFp32Work work{};
  work.keys = p.dk != nullptr || p.dv != nullptr;
  work.slopes = p.dbias != nullptr && has_slopes(p.bias_mask);
  if (p.dbias != nullptr && !work.slopes) {
    work.bias_plan = {plan_bias_tiles(p, Bias::kBlockRows, Bias::kBlockColumns), nullptr};
    work.bias_plan.splits = splits_for_any_device(work.bias_plan);
    // Behind a softcap that does not bound it, the bias has another gradient than its score.
    const bool same = p.softcap == 0.f || p.bias_mask.capped != 0;
    work.writes_bias = !work.bias_plan.shared && same;
    if (has_ragged_bias(p)) {
      work.bias_plan.elements = p.heads_q * p.bias_mask.mask_strides.batch1;
      work.writes_bias = true;
    }
    work.bias = !work.writes_bias;
    if (work.bias && work.bias_plan.splits > 1)
      work.bias_bytes = rounded(work.bias_plan.splits * work.bias_plan.elements * int64_t{4});
  }
  work.queries = p.dq != nullptr || work.writes_bias;
  work.statistics_bytes =
      rounded(p.batch0 * p.batch1 * p.heads_q * p.seq_q * static_cast<int64_t>(sizeof(float2)));
  return work;
}

// Whether there is a softcap, and nothing is added before it.
inline bool is_capped_first(const FlashsciBackwardParams& p) {
  return p.softcap != 0.f && !p.bias_mask.capped;
}

// Tiles without and with a bias or mask, which take registers.
template <class Plain_, class WithBiasMask_ = Plain_>
struct Tiles {
  using Plain = Plain_;
  using WithBiasMask = WithBiasMask_;
  static constexpr int kDim = Plain::kDim;
};

template <class C, int kWhat, bool kHasBiasMask>
cudaError_t launch_tile(const FlashsciBackwardParams& p, BackwardFp32Plan plan,
                        cudaStream_t stream) {
  constexpr bool kKeys = kWhat != kQueries;
  const int seq = kKeys ? p.seq_k : p.seq_q;
  const int64_t tiles = num_tiles(seq, C::kBlockRows, p.num_seqs, p.cu_seqlens_q != nullptr);
  plan.tiles = static_cast<uint32_t>(tiles);
  const int64_t blocks = tiles * (kKeys ? p.heads_k : p.heads_q) * p.batch0 * p.batch1;
  constexpr size_t kShared = sizeof(BackwardStorage<C>);
  static_assert(kShared <= (C::kDim <= 128 ? 99 : 227) * 1024,
                "a block has 99 KiB on the smallest device, 227 where the widest tile is used");
  return launch<backward_fp32_kernel<C, kWhat, kHasBiasMask>>(blocks, C::kThreads, kShared,
                                                              p.device, stream, p, plan);
}

template <class Tiles>
cudaError_t launch_queries(const FlashsciBackwardParams& p, const BackwardFp32Plan& plan,
                           cudaStream_t stream) {
  return p.bias_mask.bias != nullptr || p.bias_mask.mask != nullptr
             ? launch_tile<typename Tiles::WithBiasMask, kQueries, true>(p, plan, stream)
             : launch_tile<typename Tiles::Plain, kQueries, false>(p, plan, stream);
}

// dk and dv, one after the other if both do not fit the registers.
template <class C, bool kHasBiasMask>
cudaError_t launch_keys(const FlashsciBackwardParams& p, const BackwardFp32Plan& plan,
                        cudaStream_t stream) {
  if constexpr (C::kDim <= (kHasBiasMask ? 64 : 128)) {
    return launch_tile<C, kKeysBoth, kHasBiasMask>(p, plan, stream);
  } else {
    cudaError_t error = cudaSuccess;
    if (p.dk != nullptr) error = launch_tile<C, kKeysK, kHasBiasMask>(p, plan, stream);
    if (error == cudaSuccess && p.dv != nullptr)
      error = launch_tile<C, kKeysV, kHasBiasMask>(p, plan, stream);
    return error;
  }
}

template <class C>
cudaError_t launch_short(const FlashsciBackwardParams& p, BackwardFp32Plan plan,
                         cudaStream_t stream) {
  plan.inner = is_capped_first(p) ? p.scale / p.softcap : p.scale;
  return launch<backward_short_fp32_kernel<C>>(p.batch0 * p.batch1 * p.heads_k,
                                               (p.seq_k + 31) / 32 * 32, sizeof(ShortStorage<C>),
                                               p.device, stream, p, plan);
}

// Up to 160 keys and head dims up to 32: shared memory holds both operands of all queries of such a
// row as well.
template <int kDim>
using WideShortTile = ShortTile<kDim, 5, 144, 2>;

// Whether one CTA takes all keys of a head, and there are enough CTAs.
template <int kDim>
bool takes_short(const FlashsciBackwardParams& p) {
  const bool enough = p.batch0 * p.batch1 * p.heads_k >= 64 || p.seq_q <= 256;
  if (p.cu_seqlens_q != nullptr || p.seq_k == 0 || !enough) return false;
  if constexpr (kDim <= 16) return p.seq_k <= 256;
  if constexpr (kDim <= 32) {
    // One CTA an SM was slower than two kernels.
    constexpr int kBytes = sizeof(ShortStorage<WideShortTile<kDim>>) + 1024;
    const bool wide = p.seq_k > 96 && p.seq_k <= 160 && 2 * kBytes <= p.shared_per_sm;
    return p.seq_k <= 32 || wide;
  }
  return false;
}

template <int kDim>
cudaError_t launch_short_of(const FlashsciBackwardParams& p, const BackwardFp32Plan& plan,
                            cudaStream_t stream) {
  if constexpr (kDim <= 16)
    if (p.seq_k > 32) return launch_short<ShortTile<kDim, 8, 128, 2>>(p, plan, stream);
  if constexpr (kDim > 16 && kDim <= 32)
    if (p.seq_k > 32) return launch_short<WideShortTile<kDim>>(p, plan, stream);
  if constexpr (kDim <= 32) return launch_short<ShortTile<kDim, 1, 32, 8>>(p, plan, stream);
  return cudaErrorNotSupported;
}

template <class Keys, class Queries, class Bias>
cudaError_t launch_backward_tiles(const FlashsciBackwardParams& p, cudaStream_t stream) {
  const int64_t heads = p.batch0 * p.batch1 * p.heads_q;
  if (p.batch0 * p.batch1 > INT32_MAX) return cudaErrorInvalidValue;
  const bool ragged = has_ragged_bias(p);
  if (ragged && p.dbias != nullptr && !has_ragged_gradient(p)) return cudaErrorNotSupported;
  BackwardFp32Work work = plan_work<Bias>(p);
  BackwardFp32Plan plan{};
  plan.statistics = static_cast<float2*>(p.workspace);
  work.bias_plan.sums =
      reinterpret_cast<float*>(static_cast<char*>(p.workspace) + work.statistics_bytes);
  plan.vector = p.copy_bytes == 16 && (p.head_dim | p.head_dim_v) % 4 == 0;
  plan.vector_dq = takes_paired_stores(p.dq, p.dq_strides, p.head_dim);
  plan.vector_dk = takes_paired_stores(p.dk, p.dk_strides, p.head_dim);
  plan.vector_dv = takes_paired_stores(p.dv, p.dv_strides, p.head_dim_v);
  const bool bias_mask = p.bias_mask.bias != nullptr || p.bias_mask.mask != nullptr;
  plan.plain = !bias_mask && p.softcap == 0.f && p.scale > 0.f;
  plan.inner = is_capped_first(p) ? p.scale / p.softcap : plan.plain ? p.scale * kLog2e : p.scale;
  plan.cap = p.softcap;
  plan.inverse_cap = p.bias_mask.capped ? 1.f / p.softcap : 0.f;
  plan.write_bias = work.writes_bias;
  plan.bias_mask = BiasMaskAccess::of(p, p.bias_mask, p.seq_k);
  FlashsciBiasMask dbias{};
  dbias.bias = p.dbias, dbias.bias_strides = p.dbias_strides;
  plan.vector_dbias = BiasMaskAccess::of(p, dbias, p.seq_k).vector_bias;

  cudaError_t error = cudaSuccess;
  if (heads * p.seq_q > 0) {
    int lanes = 4;  // per row
    while (lanes < 32 && lanes * 4 < p.head_dim_v) lanes *= 2;
    const int64_t tiles_of_rows = (int64_t{p.seq_q} + 256 / lanes - 1) / (256 / lanes);
    error = launch<statistics_fp32_kernel>(tiles_of_rows * heads, 256, 0, p.device, stream, p,
                                           plan.statistics, static_cast<uint32_t>(tiles_of_rows),
                                           lanes, plan.vector);
  }
  if (error == cudaSuccess && p.dbias != nullptr && work.bias_plan.elements > 0 &&
      ((work.writes_bias && (p.window_left >= 0 || p.window_right >= 0 || ragged)) ||
       heads * p.seq_q * p.seq_k == 0))
    error = clear_memory(p.dbias, work.bias_plan.elements * sizeof(float), stream);
  const bool short_keys = takes_short<Bias::kDim>(p) && (work.keys || work.queries);
  if (error == cudaSuccess && short_keys) error = launch_short_of<Bias::kDim>(p, plan, stream);
  if (error == cudaSuccess && work.keys && !short_keys)
    error = bias_mask ? launch_keys<typename Keys::WithBiasMask, true>(p, plan, stream)
                      : launch_keys<typename Keys::Plain, false>(p, plan, stream);
  if (error == cudaSuccess && work.queries && !short_keys)
    error = launch_queries<Queries>(p, plan, stream);
  if (error == cudaSuccess && work.slopes) {
    FlashsciBackwardParams without_dq = p;
    without_dq.dq = nullptr;
    error = launch_queries<Queries>(without_dq, plan, stream);
  }
  if (error == cudaSuccess && work.bias && heads * p.seq_q * p.seq_k > 0) {
    error = launch<bias_gradient_fp32_kernel<Bias>>(work.bias_plan.blocks(), Bias::kThreads,
                                                    sizeof(BackwardStorage<Bias>), p.device, stream,
                                                    p, plan, work.bias_plan);
    if (error == cudaSuccess && work.bias_plan.splits > 1)
      error = launch<bias_sum_fp32_kernel>(
          std::min<int64_t>((work.bias_plan.elements + 255) / 256, 4096), 256, 0, p.device, stream,
          static_cast<float*>(p.dbias), static_cast<const float*>(work.bias_plan.sums),
          work.bias_plan.splits, work.bias_plan.elements);
  }
  return error;
}

}  // namespace flashsci::sm80::bwd_fp32
