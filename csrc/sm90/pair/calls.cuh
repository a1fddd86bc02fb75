// The host side that kernels of all dtypes have in common: the calls they take, the number of CTAs
// in a cluster, and the workspace.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../../core/launch.cuh"
#include "config.cuh"

namespace flashsci::sm90::pair {

inline constexpr int kRowThreads = 256, kRowLanes = 4;        // in the statistics kernel
inline constexpr int kRowsOfBlock = kRowThreads / kRowLanes;  // of one head
static_assert(kRowsOfBlock % kRows == 0, "blocks end where statistics do");

// Whether heads are neighbours, every pair has its own values, and the heads divide into quads.
inline bool by_quads(const void* data, const FlashsciScoreStrides& s) {
  return s.head == 1 && s.row != 0 && s.column > 1 &&
         (s.batch0 | s.batch1 | s.row | s.column) % 4 == 0 &&
         reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// The conditions that forward and backward share. A bias that batches share is comparatively small:
// its copy is cheap, and its gradient is a sum.
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

inline int64_t tiles_of(int rows) { return (int64_t{rows} + kRows - 1) / kRows; }

// CTAs per cluster, which share the blocks of `rows`: the number that the multiprocessors can hold.
// (Of clusters of 8 not so many run at a time: a GPC has 16 or 18 multiprocessors.)
inline int cluster_size(int64_t clusters, int rows, int device) {
  int size = 1;
  while (size < kMostCtas && 2 * size <= tiles_of(rows) &&
         2 * size * clusters <= processors_of(device))
    size *= 2;
  return size;
}

// Launches clusters for `rows` in all. dependent: whether to start before the preceding kernel ends.
template <auto kKernel, class... Arguments>
cudaError_t launch_clusters(int64_t clusters, int rows, int threads, int shared, bool dependent,
                            int device, cudaStream_t stream, const Arguments&... arguments) {
  const int size = cluster_size(clusters, rows, device);
  if (clusters == 0) return cudaSuccess;
  if (clusters * size > INT32_MAX) return cudaErrorInvalidValue;
  const cudaError_t error = allow_shared<kKernel>(shared, device);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = size;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(clusters * size);
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = dependent ? 2 : 1;
  return launch_configured<kKernel>(config, arguments...);
}

// Bytes of shared memory for a storage that begins at a multiple of 1,024.
template <class Storage>
constexpr int shared_of() {
  static_assert(sizeof(Storage) + 1024 <= kSharedBytes, "no room");
  return sizeof(Storage) + 1024;
}

// Rows per head in the workspace.
inline int64_t statistics_rows(int seq_q) {
  return (int64_t{seq_q} + kRowsOfBlock - 1) / kRowsOfBlock * kRowsOfBlock;
}

inline int64_t backward_workspace(const FlashsciBackwardParams& p) {
  return p.batch0 * p.batch1 * p.heads_q * statistics_rows(p.seq_q) *
         static_cast<int64_t>(sizeof(float2));
}

}  // namespace flashsci::sm90::pair
