// The host side of these kernels: which calls they take, with which tiles, and the launch.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "../../core/launch.cuh"
#include "../../include/flashsci_pair.h"
#include "../tma_map.h"
#include "backward.cuh"
#include "forward.cuh"
#include "half.cuh"
#include "single.cuh"
#include "statistics.cuh"

namespace flashsci::sm90::pair {

// Rows of 16-byte pieces.
inline bool by_pieces(const void* data, const FlashsciStrides& s, int element_bytes) {
  return (s.batch0 | s.batch1 | s.head | s.row) * element_bytes % 16 == 0 &&
         reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// Whether heads are neighbours, every pair has values of its own, and quads of them are whole.
inline bool by_quads(const void* data, const FlashsciScoreStrides& s, int element_bytes) {
  return s.head == 1 && s.row != 0 && s.column > 1 &&
         (s.batch0 | s.batch1 | s.row | s.column) * element_bytes % 16 == 0 &&
         reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// What forward and backward ask alike. A bias that batches share is small beside them: a copy of it
// costs little, and its gradient is a sum.
template <class Params>
bool takes(const Params& p, int element_bytes) {
  const FlashsciScoreStrides &bias = p.bias_mask.bias_strides, &mask = p.bias_mask.mask_strides;
  const int elements = 16 / element_bytes;
  return p.bias_mask.bias != nullptr && p.cu_seqlens_q == nullptr && p.heads_q == p.heads_k &&
         p.heads_q % kQuad == 0 &&
         std::max(p.head_dim, p.head_dim_v) <= (elements == 8 ? 64 : 32) &&
         p.head_dim % elements == 0 && p.head_dim_v % elements == 0 && p.copy_bytes >= 16 &&
         p.window_left < 0 && p.window_right < 0 && p.softcap == 0.f &&
         (p.batch0 == 1 || bias.batch0 != 0) && (p.batch1 == 1 || bias.batch1 != 0) &&
         by_quads(p.bias_mask.bias, bias, p.bias_mask.bias_is_fp32 ? 4 : 2) &&
         (p.bias_mask.mask == nullptr || (mask.row == 0 && mask.head == 0));
}

// Of a head in the workspace: whole blocks of any tiling.
inline int64_t statistics_rows(int seq_q) {
  return (int64_t{seq_q} + kRowsOfBlock - 1) / kRowsOfBlock * kRowsOfBlock;
}

// Calls with the shape of tiles of a call that `takes` lets pass. Op: void for fp32.
template <class Op, class Params, class Call>
auto with_shape(const Params& p, Call&& call) {
  const int widest = std::max(p.head_dim, p.head_dim_v);
  const bool eight = p.heads_q % (2 * kQuad) == 0;
  const auto of_quads = [&](auto format, auto bias_bytes) {
    using F = decltype(format);
    constexpr int kBytes = decltype(bias_bytes)::value;
    return eight ? call(Shape<F, 2, kBytes>{}) : call(Shape<F, 1, kBytes>{});
  };
  const std::integral_constant<int, 2> two;
  const std::integral_constant<int, 4> four;
  if constexpr (std::is_void_v<Op>) {
    return widest <= 24 ? of_quads(Single<24>{}, four) : of_quads(Single<32>{}, four);
  } else if (p.bias_mask.bias_is_fp32) {
    return widest <= 32 ? of_quads(Half<Op, 32>{}, four) : of_quads(Half<Op, 64>{}, four);
  } else {
    return widest <= 32 ? of_quads(Half<Op, 32>{}, two) : of_quads(Half<Op, 64>{}, two);
  }
}

// The maps that forward and backward have in common, all with boxes of kRows rows of kHeads heads.
template <class C, class Op, class Params>
cudaError_t encode_maps(Maps& maps, const Params& p) {
  const MapElement element = std::is_void_v<Op> ? kFloat32 : kBfloat16;  // of 16 bits: as they are
  cudaError_t error = cudaSuccess;
  const auto rows = [&](CUtensorMap& map, const void* data, const FlashsciStrides& strides,
                        int count, int columns) {
    if (error == cudaSuccess)
      error = encode_map(&map, data, element, columns,
                         dense_dims(strides, count, p.heads_q, p.batch1, p.batch0), C::kDim, kRows,
                         C::kHeads);
  };
  rows(maps.q, p.q, p.q_strides, p.seq_q, p.head_dim);
  rows(maps.k, p.k, p.k_strides, p.seq_k, p.head_dim);
  rows(maps.v, p.v, p.v_strides, p.seq_k, p.head_dim_v);
  const FlashsciScoreStrides& s = p.bias_mask.bias_strides;
  const auto pairs = [&](CUtensorMap& map, int inner, int64_t step, int outer, int64_t far_step) {
    if (error == cudaSuccess)
      error = encode_map(
          &map, p.bias_mask.bias, C::kBiasBytes == 4 ? kFloat32 : kBfloat16, p.heads_q,
          MapDims{{inner, outer, p.batch1, p.batch0}, {step, far_step, s.batch1, s.batch0}},
          C::kCellHeads, kRows, kRows);
  };
  pairs(maps.bias, p.seq_k, s.column, p.seq_q, s.row);
  if constexpr (std::is_same_v<Params, FlashsciBackwardParams>) {
    rows(maps.dout, p.dout, p.dout_strides, p.seq_q, p.head_dim_v);
    pairs(maps.bias_of_keys, p.seq_q, s.row, p.seq_k, s.column);
  }
  return error;
}

inline int64_t tiles_of(int rows) { return (int64_t{rows} + kRows - 1) / kRows; }

// CTAs of a cluster, which share the blocks of `rows` among them: as many as there are
// multiprocessors for. Of clusters of 8 not all that number are at work at a time: GPCs have 16 or 18.
inline int cluster_size(int64_t clusters, int rows, int block, int device) {
  const int blocks = (rows + block - 1) / block;
  int size = 1;
  while (size < kMostCtas && 2 * size <= blocks && 2 * size * clusters <= processors_of(device))
    size *= 2;
  return size;
}

// beside: before the kernel that precedes it ends.
template <auto kKernel, class Params>
cudaError_t launch_clusters(int64_t clusters, int size, int shared, bool beside, int device,
                            cudaStream_t stream, const Params& p, const Plan& plan,
                            const Maps& maps) {
  const int64_t blocks = clusters * size;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const cudaError_t error = allow_shared<kKernel>(shared, device);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = size;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = beside ? 2 : 1;
  return cudaLaunchKernelEx(&config, kKernel, p, plan, maps);
}

template <class Op>
cudaError_t launch_forward(const FlashsciForwardParams& p, cudaStream_t stream) {
  constexpr int kBytes = std::is_void_v<Op> ? 4 : 2;
  if (!takes(p, kBytes) || !by_pieces(p.out, p.out_strides, kBytes)) return cudaErrorNotSupported;
  return with_shape<Op>(p, [&](auto shape) {
    using C = Tiling<decltype(shape), 1>;
    static_assert(sizeof(Storage<C>) + 1024 <= kSharedBytes, "over the budget");
    Maps maps;
    const cudaError_t error = encode_maps<C, Op>(maps, p);
    if (error != cudaSuccess) return error;
    Plan plan{};
    plan.query_tiles = static_cast<uint32_t>(tiles_of(p.seq_q));
    const int64_t clusters = plan.query_tiles * (p.batch0 * p.batch1 * (p.heads_q / C::kHeads));
    return launch_clusters<forward_kernel<C>>(
        clusters, cluster_size(clusters, p.seq_k, C::kBlock, p.device), sizeof(Storage<C>) + 1024,
        false, p.device, stream, p, plan, maps);
  });
}

// Eight heads a CTA.
template <class Params>
bool takes_gradients(const Params& p) {
  return p.heads_q % (2 * kQuad) == 0;
}

template <class C>
cudaError_t launch_backward_shape(const FlashsciBackwardParams& p, cudaStream_t stream) {
  static_assert(sizeof(Storage<C>) + 1024 <= kSharedBytes, "over the budget");
  Maps maps;
  cudaError_t error = encode_maps<C, void>(maps, p);
  if (error != cudaSuccess) return error;
  Plan plan{};
  plan.query_tiles = static_cast<uint32_t>(tiles_of(p.seq_q));
  plan.key_tiles = static_cast<uint32_t>(tiles_of(p.seq_k));
  auto* statistics = static_cast<float2*>(p.workspace);
  plan.statistics = statistics, plan.statistics_rows = statistics_rows(p.seq_q);
  const int64_t groups = p.batch0 * p.batch1 * (p.heads_q / C::kHeads);
  const int64_t queries = p.dq != nullptr || p.dbias != nullptr ? plan.query_tiles * groups : 0;
  const int64_t keys = p.dk != nullptr || p.dv != nullptr ? plan.key_tiles * groups : 0;
  if (queries > INT32_MAX) return cudaErrorInvalidValue;
  plan.query_clusters = static_cast<uint32_t>(queries);
  const int64_t tiles = plan.statistics_rows / kRowsOfBlock;
  error = launch<statistics_kernel<typename C::Format>>(
      tiles * p.heads_q * p.batch0 * p.batch1, kRowThreads, 0, p.device, stream, p, statistics,
      plan.statistics_rows, static_cast<uint32_t>(tiles));
  if (error != cudaSuccess) return error;
  const int rows = std::min(p.seq_q, p.seq_k);
  return launch_clusters<backward_kernel<C>>(
      queries + keys, cluster_size(queries + keys, rows, C::kBlock, p.device),
      sizeof(Storage<C>) + 1024, true, p.device, stream, p, plan, maps);
}

inline cudaError_t launch_backward(const FlashsciBackwardParams& p, cudaStream_t stream) {
  const auto by_rows = [](const void* data, const FlashsciStrides& strides) {
    return data == nullptr || by_pieces(data, strides, 4);
  };
  if (!takes(p, 4) || !takes_gradients(p) || p.dout == nullptr || !by_rows(p.out, p.out_strides) ||
      !by_rows(p.dout, p.dout_strides) || !by_rows(p.dq, p.dq_strides) ||
      !by_rows(p.dk, p.dk_strides) || !by_rows(p.dv, p.dv_strides) ||
      (p.dbias != nullptr && !by_quads(p.dbias, p.dbias_strides, 4)))
    return cudaErrorNotSupported;
  return std::max(p.head_dim, p.head_dim_v) <= 24
             ? launch_backward_shape<Tiling<Shape<Single<24>, 2, 4>, 2>>(p, stream)
             : launch_backward_shape<Tiling<Shape<Single<32>, 2, 4>, 2>>(p, stream);
}

// Of 16 bits the backward of a copy is faster (docs/kernels/sm90_pair.md).
template <class Op>
int takes_call(const FlashsciForwardParams& p) {
  constexpr bool kSingle = std::is_void_v<Op>;
  if (!takes(p, kSingle ? 4 : 2)) return FLASHSCI_COPIED;
  return kSingle && takes_gradients(p) ? FLASHSCI_AS_GIVEN : FLASHSCI_FORWARD_AS_GIVEN;
}

inline int64_t backward_workspace(const FlashsciBackwardParams& p) {
  return p.batch0 * p.batch1 * p.heads_q * statistics_rows(p.seq_q) *
         static_cast<int64_t>(sizeof(float2));
}

}  // namespace flashsci::sm90::pair
