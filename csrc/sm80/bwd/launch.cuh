// The host side of the backward: the kernels of a call, their tiles, and their workspace.
//
//     statistics                    always
//     backward_kernel               dk, dv, and dq unless its sums over key tiles must be in order
//     backward_bias_mask_kernel     the same with a bias or a mask, or rows off 16 bytes; dbias
//                                   if it has an element for every pair
//     dq_kernel                     after one of the two added up dq
//     backward_queries_kernel       dq of deterministic calls, and dq alone; without dq, the
//                                   gradient of slopes of ALiBi
//     bias_gradient_kernel          dbias of a shared bias
//
// Dropout is a last argument of all but dq_kernel (csrc/sm80/dropout), and has no backward_kernel.
#pragma once
#include <algorithm>

#include "../../core/launch.cuh"
#include "../dbias/kernel.cuh"
#include "../dq/kernel.cuh"
#include "bias_mask_kernel.cuh"
#include "kernel.cuh"
#include "preprocess.cuh"

namespace flashsci::sm80::bwd {

using namespace dq;
using namespace dbias;

#ifndef FLASHSCI_TILE_PRESET
#define FLASHSCI_TILE_PRESET 1
#endif
// t4_safe: tiles for 64 KiB (up to D 128); ampere_balanced: tiles for 99 KiB, and larger ones if
// the device has room.
inline constexpr bool kTight = FLASHSCI_TILE_PRESET == 0;
inline constexpr int kTilesBudget = 99 * 1024;

// Tiles by padded head dim: head dim, keys, queries, warps over keys, warps over queries, stages,
// CTAs an SM (, queries at a time). Measured in docs/develop/kernels/sm80_backward.md. Large: plain
// calls on devices with room; WithBiasMask: the same with a bias or mask, or unaligned rows; Small:
// all calls elsewhere.
template <int kHeadDim>
struct KeyTiles;
template <>
struct KeyTiles<32> {
  using Large = BackwardTiling<32, 128, 64, 4, 1, 2, 3>;
  using WithBiasMask = BackwardTiling<32, 128, 64, 4, 1, 2, 3, 16>;
  using Small = WithBiasMask;
};
template <>
struct KeyTiles<64> {
  using Large = BackwardTiling<64, 128, 64, 4, 1, 2, 2>;
  using WithBiasMask = Large;
  using Small = std::conditional_t<kTight, BackwardTiling<64, 64, 64, 2, 1, 2, 2>, Large>;
};
template <>
struct KeyTiles<96> {
  using Large = BackwardTiling<96, 128, 64, 4, 2, 2, 1>;
  using WithBiasMask = Large;
  using Small = BackwardTiling<96, 64, 32, 2, 2, 2, 1>;
};
template <>
struct KeyTiles<128> {
  using Large = BackwardTiling<128, 128, 64, 4, 2, 2, 1>;
  using WithBiasMask = BackwardTiling<128, 128, 64, 4, 2, 2, 1, 16>;
  using Small = std::conditional_t<kTight, BackwardTiling<128, 32, 32, 1, 2, 2, 1>,
                                   BackwardTiling<128, 64, 32, 2, 2, 2, 1>>;
};
template <>
struct KeyTiles<192> {
  using Large = BackwardTiling<192, 64, 64, 2, 4, 2, 1>;
  using WithBiasMask = Large;
  using Small = BackwardTiling<192, 32, 32, 2, 2, 2, 1>;
};
template <>
struct KeyTiles<256> {
  using Large = BackwardTiling<256, 64, 64, 2, 4, 2, 1>;
  using WithBiasMask = Large;
  using Small = BackwardTiling<256, 32, 32, 2, 2, 1, 1>;
};

// Head dim, queries, keys, stages, CTAs an SM.
template <int kHeadDim>
using QueryTiles = std::conditional_t<
    kHeadDim <= 64, QueryTiling<kHeadDim, 128, 64, 2, 2>,
    std::conditional_t<kHeadDim <= 128,
                       std::conditional_t<kTight, QueryTiling<kHeadDim, 64, 32, 1, 2>,
                                          QueryTiling<kHeadDim, 128, 32, 2, 2>>,
                       std::conditional_t<kHeadDim <= 192, QueryTiling<kHeadDim, 64, 32, 2, 2>,
                                          QueryTiling<kHeadDim, 64, 32, 1, 2>>>>;
template <int kHeadDim>
using BiasTiles = std::conditional_t<
    kHeadDim <= 64, BiasTiling<kHeadDim, 128, 64, kHeadDim == 64 && kTight ? 1 : 2, 2>,
    std::conditional_t<kHeadDim <= 128, BiasTiling<kHeadDim, kTight ? 64 : 128, 64, 1, 2>,
                       BiasTiling<kHeadDim, 64, 32, 1, 2>>>;

// All tiles of a padded head dim.
template <int kHeadDim>
struct PaddedTiles : KeyTiles<kHeadDim> {
  using Queries = QueryTiles<kHeadDim>;
  using Bias = BiasTiles<kHeadDim>;
};

// The plan of one call, before any pointer into the workspace is known.
struct BackwardWork {
  bool large, keys, adds_dq, writes_dq, queries, slopes, writes_bias, bias;
  int64_t query_slots;
  BiasPlan bias_plan;
  int64_t statistics_bytes, sums_bytes, bias_bytes;  // of the workspace
  int64_t bytes() const { return statistics_bytes + sums_bytes + bias_bytes; }
};

template <class C>
BiasPlan plan_bias(const FlashsciBackwardParams& p) {
  BiasPlan plan = plan_bias_tiles(p, C::kBlockQ, C::kBlockK);
  plan.splits = 1;
  const int64_t owners = BiasPlan::product(plan.own);
  const int64_t members = BiasPlan::product(plan.members);
  if (owners == 0) return plan;
  // The number of CTAs that the device runs at a time, or a few times that, so that the last wave
  // is full; a CTA's start and end take as long as kOverhead members.
  constexpr int64_t kOverhead = 6, kMostWaves = 12;
  const int64_t slots = int64_t{C::kMinBlocks} * processors_of(p.device);
  int64_t least = INT64_MAX;
  for (int64_t most = 1; most <= kMostWaves; ++most) {
    const int64_t splits =
        std::clamp<int64_t>(most * slots / owners, 1, std::max<int64_t>(members, 1));
    const int64_t waves = (owners * splits + slots - 1) / slots;
    const int64_t time = waves * ((members + splits - 1) / splits + kOverhead);
    if (time >= least) continue;
    least = time;
    plan.splits = static_cast<uint32_t>(splits);
  }
  return plan;
}

template <class Tiles>
BackwardWork plan_work(const FlashsciBackwardParams& p) {
  using Large = typename Tiles::Large;
  using Small = typename Tiles::Small;
  constexpr int kReserved = 1024;  // per CTA, by the system
  BackwardWork work{};
  work.large = !kTight && static_cast<int>(sizeof(BackwardBiasMaskShared<Large>)) + kReserved <=
                              p.shared_per_sm;
  const int longest = p.cu_seqlens_q != nullptr ? p.max_seqlen_k : p.seq_k;
  const bool one_tile = longest >= 0 && longest <= (work.large ? Large::kBlockK : Small::kBlockK);
  work.slopes = p.dbias != nullptr && has_slopes(p.bias_mask);
  const bool wants_dq = p.dq != nullptr, wants_bias = p.dbias != nullptr && !work.slopes;
  const bool ragged = has_ragged_bias(p);
  work.keys = p.dk != nullptr || p.dv != nullptr || (wants_bias && ragged);
  work.writes_dq = wants_dq && work.keys && one_tile;
  work.adds_dq = wants_dq && work.keys && !one_tile && !p.deterministic;
  work.queries = wants_dq && !work.writes_dq && !work.adds_dq;

  const auto rounded = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const int64_t heads = p.batch0 * p.batch1 * p.heads_q;
  const int block_q = work.large ? Large::kBlockQ : Small::kBlockQ;
  work.query_slots = num_tiles(p.seq_q, block_q, p.num_seqs, p.cu_seqlens_q != nullptr);
  work.statistics_bytes = rounded(heads * p.seq_q * static_cast<int64_t>(sizeof(float2)));
  if (work.adds_dq)
    work.sums_bytes = rounded(heads * work.query_slots * block_q * Large::kHeadDim * int64_t{4});
  if (wants_bias) {
    work.bias_plan = plan_bias<typename Tiles::Bias>(p);
    // Behind a softcap that does not bound it, the bias has another gradient than its score.
    const bool same = p.softcap == 0.f || p.bias_mask.capped != 0;
    work.writes_bias = work.keys && work.bias_plan.shared == 0 && same;
    if (ragged) {
      work.bias_plan.elements = p.heads_q * p.bias_mask.mask_strides.batch1;
      work.writes_bias = true;
    }
    work.bias = !work.writes_bias;
    if (work.bias && work.bias_plan.splits > 1)
      work.bias_bytes = rounded(work.bias_plan.splits * work.bias_plan.elements * int64_t{4});
  }
  return work;
}

template <class Op, class C, bool kHasBiasMask, class... Drop>
cudaError_t launch_keys(const FlashsciBackwardParams& p, const BackwardPlan& plan,
                        cudaStream_t stream, const Drop&... dropout) {
  using Shared = std::conditional_t<kHasBiasMask, BackwardBiasMaskShared<C>, BackwardShared<C>>;
  static_assert(sizeof(Shared) == (2 * C::kBlockK + 2 * C::kStages * C::kBlockQ) * C::kHeadDim * 2 +
                                      C::kRoles * C::kBlockK * C::kBlockQ * 2 +
                                      C::kStages * C::kBlockQ * 8 +
                                      kHasBiasMask * sizeof(KeyTileWork),
                "the plan has no padding");
  constexpr auto kernel = [] {
    if constexpr (kHasBiasMask)
      return backward_bias_mask_kernel<Op, C, Drop...>;
    else
      return backward_kernel<Op, C>;
  }();
  const int64_t tiles =
      std::max(num_tiles(p.seq_k, C::kBlockK, p.num_seqs, p.cu_seqlens_q != nullptr),
               int64_t{plan.writes_dq != 0});
  cudaError_t error =
      launch<kernel>(tiles * p.heads_k * p.batch0 * p.batch1, C::kThreads, sizeof(Shared), p.device,
                     stream, p, plan, static_cast<uint32_t>(tiles), dropout...);
  if (error == cudaSuccess && plan.adds_dq)
    error = launch<dq_kernel<Op, C>>(
        static_cast<int64_t>(plan.query_slots) * p.heads_q * p.batch0 * p.batch1, kRowThreads, 0,
        p.device, stream, p, plan);
  return error;
}

template <class Op, class Tiles, class... Drop>
cudaError_t launch_keys(const FlashsciBackwardParams& p, const BackwardPlan& plan, bool large,
                        cudaStream_t stream, const Drop&... dropout) {
  using Large = typename Tiles::Large;
  using WithBiasMask = typename Tiles::WithBiasMask;
  using Small = typename Tiles::Small;
  static_assert(
      sizeof(BackwardBiasMaskShared<Large>) == sizeof(BackwardBiasMaskShared<WithBiasMask>) &&
          Large::kBlockK == WithBiasMask::kBlockK && Large::kBlockQ == WithBiasMask::kBlockQ,
      "the workspace does not ask which");
  static_assert(sizeof(BackwardBiasMaskShared<Small>) <=
                    (kTight && Large::kHeadDim <= 128 ? 64 * 1024 : kTilesBudget),
                "over the budget of the tile preset");
  const bool plain = plan.vector && p.bias_mask.bias == nullptr && p.bias_mask.mask == nullptr;
  if constexpr (!kTight) {
    if (large) {
      if constexpr (sizeof...(Drop) == 0) {
        if (plain) return launch_keys<Op, Large, false>(p, plan, stream);
      }
      return launch_keys<Op, WithBiasMask, true>(p, plan, stream, dropout...);
    }
  }
  if constexpr (kTight || Large::kBlockK != Small::kBlockK)
    return launch_keys<Op, Small, true>(p, plan, stream, dropout...);
  return cudaErrorInvalidValue;
}

template <class Op, class Tiles, class... Drop>
cudaError_t launch_queries(const FlashsciBackwardParams& p, const BackwardPlan& plan,
                           cudaStream_t stream, const Drop&... dropout) {
  using C = typename Tiles::Queries;
  static_assert(sizeof(QueryShared<C>) <= kTilesBudget, "over the budget");
  const int64_t tiles = num_tiles(p.seq_q, C::kBlockQ, p.num_seqs, p.cu_seqlens_q != nullptr);
  return launch<backward_queries_kernel<Op, C, Drop...>>(
      tiles * p.heads_q * p.batch0 * p.batch1, C::kThreads, sizeof(QueryShared<C>), p.device,
      stream, p, plan, static_cast<uint32_t>(tiles), dropout...);
}

template <class Op, class Tiles, class... Drop>
cudaError_t launch_bias(const FlashsciBackwardParams& p, const BackwardPlan& plan,
                        const BiasPlan& bias, cudaStream_t stream, const Drop&... dropout) {
  using C = typename Tiles::Bias;
  static_assert(sizeof(BiasShared<C>) <= kTilesBudget, "over the budget");
  cudaError_t error = launch<bias_gradient_kernel<Op, C, Drop...>>(
      bias.blocks(), C::kThreads, sizeof(BiasShared<C>), p.device, stream, p, plan, bias,
      dropout...);
  if (error == cudaSuccess && bias.splits > 1)
    error = launch<bias_sum_kernel<Op>>(std::min<int64_t>((bias.elements + 255) / 256, 4096), 256,
                                        0, p.device, stream, p, plan, bias.splits, bias.elements);
  return error;
}

// The statistics of all rows, and zeros in the sums of dq.
template <class Op, class... Drop>
cudaError_t launch_statistics(const FlashsciBackwardParams& p, const BackwardPlan& plan,
                              int64_t sums_bytes, cudaStream_t stream, const Drop&... dropout) {
  int lanes = 4;
  while (lanes * kChunkElements < p.head_dim_v) lanes *= 2;
  const int64_t tiles = (p.seq_q + kRowThreads / lanes - 1) / (kRowThreads / lanes);
  const int vector =
      plan.vector && (p.dout == nullptr || takes_vectors(p.out, p.out_strides, p.head_dim_v));
  return launch<statistics_kernel<Op, Drop...>>(
      tiles * p.batch0 * p.batch1 * p.heads_q, kRowThreads, 0, p.device, stream, p, plan,
      static_cast<uint32_t>(tiles), lanes, vector, sums_bytes / int64_t{16}, dropout...);
}

template <class Op, class Tiles, class... Drop>
cudaError_t launch_padded(const FlashsciBackwardParams& p, cudaStream_t stream,
                          const Drop&... dropout) {
  const bool ragged = has_ragged_bias(p);
  if (ragged && p.dbias != nullptr && !has_ragged_gradient(p)) return cudaErrorNotSupported;
  const BackwardWork work = plan_work<Tiles>(p);
  const int64_t heads = p.batch0 * p.batch1 * p.heads_q;
  if (heads > INT32_MAX || work.query_slots > INT32_MAX) return cudaErrorInvalidValue;
  BackwardPlan plan{};
  auto* workspace = static_cast<unsigned char*>(p.workspace);
  plan.statistics = reinterpret_cast<float2*>(workspace);
  plan.dq_sums = reinterpret_cast<float*>(workspace + work.statistics_bytes);
  plan.bias_sums = reinterpret_cast<float*>(workspace + work.statistics_bytes + work.sums_bytes);
  plan.group = p.heads_q / p.heads_k;
  plan.query_slots = static_cast<uint32_t>(work.query_slots);
  // A scale too small to divide by is applied separately.
  const bool folds = p.scale > (p.bias_mask.bias != nullptr ? 1e-6f : 0.f);
  plan.scores = plan_scores_of(p, folds);
  plan.bias_factor = plan.scores.mode == kScaled ? 1.f / p.scale : 1.f;
  plan.bias_first = p.bias_mask.bias != nullptr && plan.scores.mode == kScaled;
  plan.vector =
      p.copy_bytes >= 16 && p.head_dim % kChunkElements == 0 && p.head_dim_v % kChunkElements == 0;
  plan.vector_dq = takes_vectors(p.dq, p.dq_strides, p.head_dim);
  plan.vector_dk = takes_vectors(p.dk, p.dk_strides, p.head_dim);
  plan.vector_dv = takes_vectors(p.dv, p.dv_strides, p.head_dim_v);
  const auto aligned = [](const void* data, const FlashsciScoreStrides& s, int size) {
    const int64_t bits = s.batch0 | s.batch1 | s.head | s.row;
    return s.column == 1 && bits % 4 == 0 && reinterpret_cast<uintptr_t>(data) % (4 * size) == 0;
  };
  const int bias_size = p.bias_mask.bias_is_fp32 ? 4 : 2;
  plan.ragged = has_ragged_pairs(p);
  plan.bias_vector =
      !ragged && p.seq_k % 4 == 0 && aligned(p.bias_mask.bias, p.bias_mask.bias_strides, bias_size);
  plan.mask_vector = p.seq_k % 4 == 0 && aligned(p.bias_mask.mask, p.bias_mask.mask_strides, 1);
  plan.dbias_vector = !ragged && p.seq_k % 4 == 0 && aligned(p.dbias, p.dbias_strides, bias_size);
  plan.adds_dq = work.adds_dq, plan.writes_dq = work.writes_dq;
  plan.writes_bias = work.writes_bias;

  // A ragged bias may hold numbers of no pair.
  const bool windowed = p.window_left >= 0 || p.window_right >= 0 || ragged;
  if (p.dbias != nullptr && (p.seq_q == 0 || p.seq_k == 0 || (work.writes_bias && windowed))) {
    // Tiles that the window hides are not visited.
    const cudaError_t error =
        clear_memory(p.dbias, work.bias_plan.elements * (p.bias_mask.bias_is_fp32 ? 4 : 2), stream);
    if (error != cudaSuccess) return error;
  }
  if (p.seq_q > 0 && (work.keys || work.queries || work.slopes || work.bias)) {
    const cudaError_t error = launch_statistics<Op>(p, plan, work.sums_bytes, stream, dropout...);
    if (error != cudaSuccess) return error;
  }
  if (work.keys) {
    const cudaError_t error = launch_keys<Op, Tiles>(p, plan, work.large, stream, dropout...);
    if (error != cudaSuccess) return error;
  }
  if (work.queries) {
    const cudaError_t error = launch_queries<Op, Tiles>(p, plan, stream, dropout...);
    if (error != cudaSuccess) return error;
  }
  if (work.slopes) {
    FlashsciBackwardParams without_dq = p;
    without_dq.dq = nullptr;
    return launch_queries<Op, Tiles>(without_dq, plan, stream, dropout...);
  }
  if (work.bias && p.seq_q > 0 && p.seq_k > 0)
    return launch_bias<Op, Tiles>(p, plan, work.bias_plan, stream, dropout...);
  return cudaSuccess;
}

// Calls `call` with the tiles of the smallest padded head dim that holds D and Dv.
template <class Call>
auto with_tiles(const FlashsciBackwardParams& p, const Call& call) {
  const int dim = std::max(p.head_dim, p.head_dim_v);
  if (dim <= 32) return call(PaddedTiles<32>{});
  if (dim <= 64) return call(PaddedTiles<64>{});
  if (dim <= 96) return call(PaddedTiles<96>{});
  if (dim <= 128) return call(PaddedTiles<128>{});
  if (dim <= 192) return call(PaddedTiles<192>{});
  return call(PaddedTiles<256>{});
}

template <class Op>
cudaError_t launch_backward(const FlashsciBackwardParams& p, cudaStream_t stream) {
  if (std::max(p.head_dim, p.head_dim_v) > FLASHSCI_MAX_HEAD_DIM) return cudaErrorInvalidValue;
  return with_tiles(p, [&](auto tiles) { return launch_padded<Op, decltype(tiles)>(p, stream); });
}

inline int64_t backward_workspace(const FlashsciBackwardParams& p) {
  return with_tiles(p, [&](auto tiles) { return plan_work<decltype(tiles)>(p).bytes(); });
}

}  // namespace flashsci::sm80::bwd
