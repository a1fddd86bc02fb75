// The host side of the kernels in fp32: their launch.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "../../core/launch.cuh"
#include "../../include/flashsci_pair.h"
#include "../tma_map.h"
#include "backward.cuh"
#include "calls.cuh"
#include "forward.cuh"
#include "statistics.cuh"

namespace flashsci::sm90::pair {

// Whether rows consist of 16-byte pieces.
inline bool by_pieces(const void* data, const FlashsciStrides& s) {
  return (s.batch0 | s.batch1 | s.head | s.row) % 4 == 0 &&
         reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// The maps that forward and backward have in common.
template <int kDim, class Params>
cudaError_t encode_maps(Maps& maps, const Params& p) {
  cudaError_t error = cudaSuccess;
  const auto rows = [&](CUtensorMap& map, const void* data, const FlashsciStrides& strides,
                        int count, int columns) {
    if (error == cudaSuccess)
      error = encode_map(&map, data, kFloat32, columns,
                         dense_dims(strides, count, p.heads_q, p.batch1, p.batch0), kDim, kRows,
                         kHeads);
  };
  const FlashsciScoreStrides& s = p.bias_mask.bias_strides;
  const auto pairs = [&](CUtensorMap& map, const void* data, const FlashsciScoreStrides& strides,
                         int inner, int64_t step, int outer, int64_t far_step) {
    if (error == cudaSuccess)
      error = encode_map(&map, data, kFloat32, p.heads_q,
                         MapDims{{inner, outer, p.batch1, p.batch0},
                                 {step, far_step, strides.batch1, strides.batch0}},
                         kHeads, kRows, kRows);
  };
  rows(maps.q, p.q, p.q_strides, p.seq_q, p.head_dim);
  rows(maps.k, p.k, p.k_strides, p.seq_k, p.head_dim);
  rows(maps.v, p.v, p.v_strides, p.seq_k, p.head_dim_v);
  pairs(maps.bias, p.bias_mask.bias, s, p.seq_k, s.column, p.seq_q, s.row);
  if constexpr (std::is_same_v<Params, FlashsciBackwardParams>) {
    rows(maps.dout, p.dout, p.dout_strides, p.seq_q, p.head_dim_v);
    pairs(maps.bias_of_keys, p.bias_mask.bias, s, p.seq_q, s.row, p.seq_k, s.column);
    const FlashsciScoreStrides& d = p.dbias_strides;
    if (p.dbias != nullptr) pairs(maps.dbias, p.dbias, d, p.seq_k, d.column, p.seq_q, d.row);
  }
  return error;
}

template <int kDim>
cudaError_t launch_forward_dim(const FlashsciForwardParams& p, cudaStream_t stream) {
  using C = Tiling<kDim, 1>;
  Maps maps;
  const cudaError_t error = encode_maps<kDim>(maps, p);
  if (error != cudaSuccess) return error;
  Plan plan{};
  plan.query_tiles = static_cast<uint32_t>(tiles_of(p.seq_q));
  const int64_t clusters = plan.query_tiles * (p.batch0 * p.batch1 * (p.heads_q / kHeads));
  return launch_clusters<forward_kernel<C>>(clusters, p.seq_k, kThreads, shared_of<Storage<C>>(),
                                            false, p.device, stream, p, plan, maps);
}

inline cudaError_t launch_forward(const FlashsciForwardParams& p, cudaStream_t stream) {
  if (!takes(p) || !by_pieces(p.out, p.out_strides)) return cudaErrorNotSupported;
  return std::max(p.head_dim, p.head_dim_v) <= 24 ? launch_forward_dim<24>(p, stream)
                                                  : launch_forward_dim<32>(p, stream);
}

template <int kDim>
cudaError_t launch_backward_dim(const FlashsciBackwardParams& p, cudaStream_t stream) {
  using C = Tiling<kDim, 2>;
  Maps maps;
  cudaError_t error = encode_maps<kDim>(maps, p);
  if (error != cudaSuccess) return error;
  Plan plan{};
  plan.query_tiles = static_cast<uint32_t>(tiles_of(p.seq_q));
  plan.key_tiles = static_cast<uint32_t>(tiles_of(p.seq_k));
  auto* statistics = static_cast<float2*>(p.workspace);
  plan.statistics = statistics, plan.statistics_rows = statistics_rows(p.seq_q);
  const int64_t groups = p.batch0 * p.batch1 * (p.heads_q / kHeads);
  const int64_t queries = p.dq != nullptr || p.dbias != nullptr ? plan.query_tiles * groups : 0;
  const int64_t keys = p.dk != nullptr || p.dv != nullptr ? plan.key_tiles * groups : 0;
  if (queries > INT32_MAX) return cudaErrorInvalidValue;
  plan.query_clusters = static_cast<uint32_t>(queries);
  const int64_t tiles = plan.statistics_rows / kRowsOfBlock;
  error = launch<statistics_kernel>(tiles * p.heads_q * p.batch0 * p.batch1, kRowThreads, 0,
                                    p.device, stream, p, statistics, plan.statistics_rows,
                                    static_cast<uint32_t>(tiles));
  if (error != cudaSuccess) return error;
  return launch_clusters<backward_kernel<C>>(queries + keys, std::min(p.seq_q, p.seq_k), kThreads,
                                             shared_of<Storage<C>>(), true, p.device, stream, p,
                                             plan, maps);
}

inline cudaError_t launch_backward(const FlashsciBackwardParams& p, cudaStream_t stream) {
  const auto by_rows = [](const void* data, const FlashsciStrides& strides) {
    return data == nullptr || by_pieces(data, strides);
  };
  if (!takes(p) || p.dout == nullptr || !by_rows(p.out, p.out_strides) ||
      !by_rows(p.dout, p.dout_strides) || !by_rows(p.dq, p.dq_strides) ||
      !by_rows(p.dk, p.dk_strides) || !by_rows(p.dv, p.dv_strides) ||
      (p.dbias != nullptr && !by_quads(p.dbias, p.dbias_strides)))
    return cudaErrorNotSupported;
  return std::max(p.head_dim, p.head_dim_v) <= 24 ? launch_backward_dim<24>(p, stream)
                                                  : launch_backward_dim<32>(p, stream);
}

}  // namespace flashsci::sm90::pair
