// The host side of these kernels: which calls they take, and the launch.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "../../core/launch.cuh"
#include "../../include/flashsci_pair.h"
#include "../tma_map.h"
#include "backward.cuh"
#include "forward.cuh"
#include "statistics.cuh"

namespace flashsci::sm90::pair {

// Rows of 16-byte pieces.
inline bool by_pieces(const void* data, const FlashsciStrides& s) {
  return (s.batch0 | s.batch1 | s.head | s.row) % 4 == 0 &&
         reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// Whether heads are neighbours, every pair has values of its own, and quads of them are whole.
inline bool by_quads(const void* data, const FlashsciScoreStrides& s) {
  return s.head == 1 && s.row != 0 && s.column > 1 &&
         (s.batch0 | s.batch1 | s.row | s.column) % 4 == 0 &&
         reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// What forward and backward ask alike. A bias that batches share is small beside them: a copy of it
// costs little, and its gradient is a sum.
template <class Params>
bool takes(const Params& p) {
  const FlashsciScoreStrides &bias = p.bias_mask.bias_strides, &mask = p.bias_mask.mask_strides;
  return p.bias_mask.bias != nullptr && p.cu_seqlens_q == nullptr && p.heads_q == p.heads_k &&
         p.heads_q % kHeads == 0 && p.head_dim <= 32 && p.head_dim_v <= 32 &&
         (p.head_dim | p.head_dim_v) % 4 == 0 && p.copy_bytes >= 16 && p.window_left < 0 &&
         p.window_right < 0 && p.softcap == 0.f && (p.batch0 == 1 || bias.batch0 != 0) &&
         (p.batch1 == 1 || bias.batch1 != 0) && by_quads(p.bias_mask.bias, bias) &&
         (p.bias_mask.mask == nullptr || (mask.row == 0 && mask.head == 0));
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

inline int64_t tiles_of(int rows) { return (int64_t{rows} + kRows - 1) / kRows; }

// CTAs of a cluster, which share the blocks of `rows` among them: as many as there are
// multiprocessors for. (Of clusters of 8 not all that number run at a time: GPCs have 16 or 18.)
inline int cluster_size(int64_t clusters, int rows, int device) {
  int size = 1;
  while (size < kMostCtas && 2 * size <= tiles_of(rows) &&
         2 * size * clusters <= processors_of(device))
    size *= 2;
  return size;
}

// beside: before the kernel that precedes it ends.
template <class C, auto kKernel, class Params>
cudaError_t launch_clusters(int64_t clusters, int rows, bool beside, cudaStream_t stream,
                            const Params& p, const Plan& plan, const Maps& maps) {
  static_assert(sizeof(Storage<C>) + 1024 <= kSharedBytes, "it begins at a multiple of 1,024");
  constexpr int kShared = sizeof(Storage<C>) + 1024;
  const int size = cluster_size(clusters, rows, p.device);
  if (clusters == 0) return cudaSuccess;
  if (clusters * size > INT32_MAX) return cudaErrorInvalidValue;
  const cudaError_t error = allow_shared<kKernel>(kShared, p.device);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = size;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(clusters * size);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kShared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = beside ? 2 : 1;
  return cudaLaunchKernelEx(&config, kKernel, p, plan, maps);
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
  return launch_clusters<C, forward_kernel<C>>(clusters, p.seq_k, false, stream, p, plan, maps);
}

inline cudaError_t launch_forward(const FlashsciForwardParams& p, cudaStream_t stream) {
  if (!takes(p) || !by_pieces(p.out, p.out_strides)) return cudaErrorNotSupported;
  return std::max(p.head_dim, p.head_dim_v) <= 24 ? launch_forward_dim<24>(p, stream)
                                                  : launch_forward_dim<32>(p, stream);
}

// Of a head in the workspace.
inline int64_t statistics_rows(int seq_q) {
  return (int64_t{seq_q} + kRowsOfBlock - 1) / kRowsOfBlock * kRowsOfBlock;
}

inline int64_t backward_workspace(const FlashsciBackwardParams& p) {
  return p.batch0 * p.batch1 * p.heads_q * statistics_rows(p.seq_q) *
         static_cast<int64_t>(sizeof(float2));
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
  return launch_clusters<C, backward_kernel<C>>(queries + keys, std::min(p.seq_q, p.seq_k), true,
                                                stream, p, plan, maps);
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
