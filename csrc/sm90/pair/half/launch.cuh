// The host side of the kernels in 16 bits: the calls they take, and the launch. Each kernel begins
// before its predecessor in the stream ends, and waits for that end.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "../../../include/flashsci_pair.h"
#include "../../launch_dependent.cuh"
#include "../../tma_map.h"
#include "../calls.cuh"
#include "backward.cuh"
#include "forward.cuh"
#include "statistics.cuh"

namespace flashsci::sm90::pair::half {

// Whether rows consist of 16-byte pieces.
inline bool by_pieces(const void* data, const FlashsciStrides& s) {
  return (s.batch0 | s.batch1 | s.head | s.row) % 8 == 0 &&
         reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// Whether rows of all heads are contiguous, so that TMA copies them in pieces of 128 bytes.
template <class Params>
bool takes(const Params& p) {
  const auto packed = [&](const FlashsciStrides& strides) { return strides.head == p.head_dim; };
  return pair::takes(p) && p.bias_mask.bias_is_fp32 && p.head_dim == p.head_dim_v &&
         (p.head_dim == 24 || p.head_dim == 32) && packed(p.q_strides) && packed(p.k_strides) &&
         packed(p.v_strides);
}

// The maps that forward and backward have in common.
template <class Op, class Params>
cudaError_t encode_maps(Maps& maps, const Params& p) {
  cudaError_t error = cudaSuccess;
  const auto rows = [&](CUtensorMap& map, const void* data, const FlashsciStrides& s, int count) {
    if (error == cudaSuccess)
      error = encode_map(&map, data, Op::kIsBf16 ? kBfloat16 : kFloat16, p.heads_q * p.head_dim,
                         dense_dims(s, count, 1, p.batch1, p.batch0), kPanelBytes / 2, kRows);
  };
  const FlashsciScoreStrides& s = p.bias_mask.bias_strides;
  const auto pairs = [&](CUtensorMap& map, const void* data, const FlashsciScoreStrides& strides,
                         int inner, int64_t step, int outer, int64_t far_step) {
    if (error == cudaSuccess)
      error = encode_map(&map, data, kFloat32, p.heads_q,
                         MapDims{{inner, outer, p.batch1, p.batch0},
                                 {step, far_step, strides.batch1, strides.batch0}},
                         kHeads, kBoxPairs, kRows);
  };
  rows(maps.q, p.q, p.q_strides, p.seq_q);
  rows(maps.k, p.k, p.k_strides, p.seq_k);
  rows(maps.v, p.v, p.v_strides, p.seq_k);
  pairs(maps.bias, p.bias_mask.bias, s, p.seq_k, s.column, p.seq_q, s.row);
  if constexpr (std::is_same_v<Params, FlashsciBackwardParams>) {
    rows(maps.dout, p.dout, p.dout_strides, p.seq_q);
    pairs(maps.bias_of_keys, p.bias_mask.bias, s, p.seq_q, s.row, p.seq_k, s.column);
    const FlashsciScoreStrides& d = p.dbias_strides;
    if (p.dbias != nullptr) pairs(maps.dbias, p.dbias, d, p.seq_k, d.column, p.seq_q, d.row);
  }
  return error;
}

template <class Op, int kDim>
cudaError_t launch_forward_dim(const FlashsciForwardParams& p, cudaStream_t stream) {
  using C = Tiling<Op, kDim, 1, 1 + kDim / 8>;
  Maps maps;
  const cudaError_t error = encode_maps<Op>(maps, p);
  if (error != cudaSuccess) return error;
  Plan plan{};
  plan.query_tiles = static_cast<uint32_t>(tiles_of(p.seq_q));
  const int64_t clusters = plan.query_tiles * (p.batch0 * p.batch1 * (p.heads_q / kHeads));
  return launch_clusters<forward_kernel<C>>(clusters, p.seq_k, kLaunched, shared_of<Storage<C>>(),
                                            true, p.device, stream, p, plan, maps);
}

template <class Op>
cudaError_t launch_forward(const FlashsciForwardParams& p, cudaStream_t stream) {
  if (!takes(p) || !by_pieces(p.out, p.out_strides)) return cudaErrorNotSupported;
  return p.head_dim == 24 ? launch_forward_dim<Op, 24>(p, stream)
                          : launch_forward_dim<Op, 32>(p, stream);
}

template <class Op, int kDim>
cudaError_t launch_backward_dim(const FlashsciBackwardParams& p, cudaStream_t stream) {
  using C = Tiling<Op, kDim, 2, 2 * kDim / 8>;
  Maps maps;
  cudaError_t error = encode_maps<Op>(maps, p);
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
  const int64_t blocks = tiles * p.heads_q * p.batch0 * p.batch1;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  error =
      launch_dependent<statistics_kernel<Op>>(blocks, kRowThreads, 0, stream, p, statistics,
                                              plan.statistics_rows, static_cast<uint32_t>(tiles));
  if (error != cudaSuccess) return error;
  return launch_clusters<backward_kernel<C>>(queries + keys, std::min(p.seq_q, p.seq_k), kLaunched,
                                             shared_of<Storage<C>>(), true, p.device, stream, p,
                                             plan, maps);
}

template <class Op>
cudaError_t launch_backward(const FlashsciBackwardParams& p, cudaStream_t stream) {
  const auto by_rows = [](const void* data, const FlashsciStrides& strides) {
    return data == nullptr || by_pieces(data, strides);
  };
  if (!takes(p) || p.dout == nullptr || !by_rows(p.out, p.out_strides) ||
      !by_rows(p.dout, p.dout_strides) || p.dout_strides.head != p.head_dim ||
      !by_rows(p.dq, p.dq_strides) || !by_rows(p.dk, p.dk_strides) ||
      !by_rows(p.dv, p.dv_strides) || (p.dbias != nullptr && !by_quads(p.dbias, p.dbias_strides)))
    return cudaErrorNotSupported;
  return p.head_dim == 24 ? launch_backward_dim<Op, 24>(p, stream)
                          : launch_backward_dim<Op, 32>(p, stream);
}

}  // namespace flashsci::sm90::pair::half
