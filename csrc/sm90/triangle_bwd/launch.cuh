// The host side of the triangle backward: the calls it takes, the division of the work, workspace,
// tensor maps.
#pragma once
#include <cuda_runtime.h>
#include <algorithm>
#include <cstdint>

#include "../../core/launch.cuh"
#include "../../core/softmax.cuh"
#include "../../include/flashsci.h"
#include "../launch_dependent.cuh"
#include "../tma_map.h"
#include "config.cuh"
#include "kernel.cuh"
#include "postprocess.cuh"
#include "preprocess.cuh"

namespace flashsci::sm90::triangle_bwd {

// With fewer members, reading the bias and writing its sums element by element does not pay.
inline constexpr int64_t kFewestMembers = 16;
// Largest number of CTAs that share the work, for any device: the workspace does not depend on it.
inline constexpr int kMostProcessors = 160;
inline constexpr int kPanelOfQueries = TriangleTiling<3>::kPanel;

inline uint32_t panels_of(const FlashsciBackwardParams& p) {
  return static_cast<uint32_t>((int64_t{p.seq_q} + kPanelOfQueries - 1) / kPanelOfQueries);
}
// Steps of a panel: two suffice for 256 queries.
inline int steps_of(const FlashsciBackwardParams& p) {
  const int64_t panels = panels_of(p);
  return p.seq_q <= panels * TriangleTiling<2>::kPanel ? 2 : 3;
}

// The division of a call's work.
inline void share_out(TriangleArgs& a, const FlashsciBackwardParams& p, int processors) {
  const bool own0 = p.dbias_strides.batch0 != 0, own1 = p.dbias_strides.batch1 != 0;
  a.own0 = static_cast<uint32_t>(own0 ? p.batch0 : 1);
  a.own1 = static_cast<uint32_t>(own1 ? p.batch1 : 1);
  a.member0 = static_cast<uint32_t>(own0 ? 1 : p.batch0);
  a.member1 = static_cast<uint32_t>(own1 ? 1 : p.batch1);
  a.owners = a.own0 * a.own1 * p.heads_q;
  a.members = a.member0 * a.member1;
  a.heads = static_cast<uint32_t>(p.batch0 * p.batch1 * p.heads_q);
  a.panels = panels_of(p);
  a.q_blocks = a.panels * steps_of(p) * kConsumers;
  a.k_blocks = (static_cast<uint32_t>(p.seq_k) + kBlock - 1) / kBlock;
  const uint32_t tiles = a.k_blocks * a.panels;
  const uint32_t groups =
      std::max(static_cast<uint32_t>(std::min(processors, kMostProcessors)) / tiles, 1u);
  a.groups = std::min(groups, a.heads);  // owners * members
}

inline bool takes(const FlashsciBackwardParams& p) {
  const bool plain = p.cu_seqlens_q == nullptr && p.softcap == 0.f && p.window_left < 0 &&
                     p.window_right < 0 && p.heads_q == p.heads_k;
  const bool all = p.dq != nullptr && p.dk != nullptr && p.dv != nullptr && p.dbias != nullptr &&
                   p.bias_mask.bias != nullptr && p.dout != nullptr;
  const bool dims = p.head_dim <= kHeadDim && p.head_dim_v <= kHeadDim && p.head_dim % 8 == 0 &&
                    p.head_dim_v % 8 == 0 && p.head_dim > 0 && p.head_dim_v > 0;
  if (!plain || !all || !dims || p.seq_q <= kBlock || p.seq_k <= kBlock) return false;
  const FlashsciScoreStrides& s = p.dbias_strides;
  if (s.row == 0 || s.column == 0 || (s.head == 0 && p.heads_q > 1)) return false;
  if (p.bias_mask.mask != nullptr && p.bias_mask.mask_strides.row != 0) return false;
  const int64_t members = (s.batch0 == 0 ? p.batch0 : 1) * (s.batch1 == 0 ? p.batch1 : 1);
  const int64_t heads = p.batch0 * p.batch1 * p.heads_q;
  const int64_t blocks = (int64_t{std::max(p.seq_q, p.seq_k)} + 6 * kBlock) / kBlock;
  // Two panels add the same sums to dK and dV in either order, three do not.
  if (p.deterministic && panels_of(p) > 2) return false;
  return members >= kFewestMembers && heads * blocks < INT32_MAX / 8 &&
         int64_t{p.seq_q} * p.seq_k < INT32_MAX / 8;
}

// Offsets of the workspace, in bytes.
struct WorkspaceParts {
  int64_t dq, dk, dv, turns, dbias, bytes;  // the statistics come first
  WorkspaceParts(const TriangleArgs& a, const FlashsciBackwardParams& p, int64_t groups) {
    const auto padded = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
    const int64_t q_blocks = int64_t{a.heads} * a.q_blocks;
    const int64_t k_sums = a.panels > 1 ? int64_t{a.heads} * a.k_blocks * kSumBytes : 0;
    dq = padded(q_blocks * static_cast<int64_t>(sizeof(Statistics)));
    dk = dq + q_blocks * kSumBytes;
    dv = dk + k_sums;
    turns = dv + k_sums;
    dbias = turns + padded(q_blocks * 4);
    bytes = dbias + (groups + a.owners) * p.seq_q * p.seq_k * 4;
  }
};

inline int64_t workspace(const FlashsciBackwardParams& p) {
  TriangleArgs a;
  share_out(a, p, kMostProcessors);
  return WorkspaceParts(a, p, a.groups).bytes;
}

template <class Op>
cudaError_t encode_maps(TriangleArgs& a) {
  const FlashsciBackwardParams& p = a.p;
  cudaError_t error = cudaSuccess;
  const auto encode = [&](CUtensorMap& map, const void* base, const FlashsciStrides& strides,
                          int64_t rows, int columns) {
    if (error == cudaSuccess)
      error = encode_map(&map, base, Op::kIsBf16 ? kBfloat16 : kFloat16, columns,
                         dense_dims(strides, rows, p.heads_q, p.batch1, p.batch0), RowBox::kColumns,
                         RowBox::kRows);
  };
  encode(a.q, p.q, p.q_strides, p.seq_q, p.head_dim);
  encode(a.dout, p.dout, p.dout_strides, p.seq_q, p.head_dim_v);
  encode(a.k, p.k, p.k_strides, p.seq_k, p.head_dim);
  encode(a.v, p.v, p.v_strides, p.seq_k, p.head_dim_v);
  encode(a.dk, p.dk, p.dk_strides, p.seq_k, p.head_dim);
  encode(a.dv, p.dv, p.dv_strides, p.seq_k, p.head_dim_v);
  return error;
}

template <class Op, class C>
cudaError_t launch_kernels(const TriangleArgs& a, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(TriangleStorage<C>) + 1024;
  static_assert(kSharedBytes <= 227 * 1024, "the shared memory of an SM");
  const FlashsciBackwardParams& p = a.p;
  constexpr auto kernel = triangle_backward_kernel<Op, C>;
  cudaError_t error = allow_shared<kernel>(kSharedBytes, p.device);
  if (error != cudaSuccess) return error;
  const uint32_t row_blocks = a.heads * a.q_blocks / kRowBlocks;
  error = start<triangle_preprocess_kernel<Op>>(row_blocks, kRowThreads, 0, stream, a);
  if (error == cudaSuccess)
    error = launch_dependent<kernel>(a.groups * a.panels * a.k_blocks, kThreads, kSharedBytes,
                                     stream, a);
  if (error != cudaSuccess) return error;
  const int64_t elements = int64_t{a.owners} * p.seq_q * p.seq_k;
  const int64_t blocks = row_pairs(a.heads, a.q_blocks) +
                         (a.panels > 1 ? 2 * row_pairs(a.heads, a.k_blocks) : 0) +
                         (elements + kRowThreads - 1) / kRowThreads;
  return launch_dependent<triangle_postprocess_kernel<Op>>(blocks, kRowThreads, 0, stream, a);
}

// cudaErrorNotSupported: another kernel must serve this call; nothing was launched.
template <class Op>
cudaError_t launch(const FlashsciBackwardParams& p, cudaStream_t stream) {
  if (!takes(p)) return cudaErrorNotSupported;
  const auto aligned = [&](const void* base, const FlashsciStrides& s, int64_t rows) {
    const auto whole = [](int64_t size, int64_t stride) { return size <= 1 || stride % 8 == 0; };
    return reinterpret_cast<uintptr_t>(base) % 16 == 0 && whole(p.batch0, s.batch0) &&
           whole(p.batch1, s.batch1) && whole(p.heads_q, s.head) && whole(rows, s.row);
  };
  if (!aligned(p.out, p.out_strides, p.seq_q) || !aligned(p.dout, p.dout_strides, p.seq_q) ||
      !aligned(p.dq, p.dq_strides, p.seq_q) || !aligned(p.dk, p.dk_strides, p.seq_k) ||
      !aligned(p.dv, p.dv_strides, p.seq_k))
    return cudaErrorNotSupported;
  TriangleArgs a;
  a.p = p;
  share_out(a, p, processors_of(p.device));
  const WorkspaceParts parts(a, p, a.groups);
  auto* const space = static_cast<unsigned char*>(p.workspace);
  a.statistics = reinterpret_cast<Statistics*>(space);
  a.dq_sums = reinterpret_cast<float*>(space + parts.dq);
  a.dk_sums = reinterpret_cast<float*>(space + parts.dk);
  a.dv_sums = reinterpret_cast<float*>(space + parts.dv);
  a.turns = reinterpret_cast<int*>(space + parts.turns);
  a.dbias_sums = reinterpret_cast<float*>(space + parts.dbias);
  a.cleared = (parts.turns - parts.dk) / 16;
  a.exp_scale = p.scale * kLog2e;
  const cudaError_t error = encode_maps<Op>(a);
  if (error != cudaSuccess) return error;
  return steps_of(p) == 2 ? launch_kernels<Op, TriangleTiling<2>>(a, stream)
                          : launch_kernels<Op, TriangleTiling<3>>(a, stream);
}

}  // namespace flashsci::sm90::triangle_bwd
