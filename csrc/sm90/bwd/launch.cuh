// The host side of the sm90 backward: tile shapes, tensor maps, workspace, and the choice of
// kernels.
#pragma once
#include <cuda_runtime.h>
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../../core/launch.cuh"
#include "../../core/softmax.cuh"
#include "../../include/flashsci.h"
#include "../launch_dependent.cuh"
#include "../tma_map.h"
#include "../triangle_bwd/launch.cuh"
#include "bias_aliased.cuh"
#include "config.cuh"
#include "config_d256.cuh"
#include "kernel.cuh"
#include "postprocess.cuh"
#include "preprocess.cuh"

namespace flashsci::sm90::bwd {

// Bytes of a workspace part, padded so that the next part is aligned.
inline int64_t padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

template <class C>
int64_t query_tiles(const FlashsciBackwardParams& p) {
  return num_tiles(p.seq_q, C::kBlockQ, p.num_seqs, p.cu_seqlens_q != nullptr);
}

template <class C>
int64_t workspace_of(const FlashsciBackwardParams& p) {
  const int64_t tiles = p.batch0 * p.batch1 * p.heads_q * query_tiles<C>(p);
  const int64_t rows = tiles * C::kBlockQ;
  return 2 * padded(rows * 4) + rows * C::kHeadDim * 4 +
         (p.deterministic ? tiles * C::kCounters * 4 : 0) + 8;
}

// Whether a CTA takes one tile of keys: with this many queries per tile on average, hiding the
// beginning and end of tiles gains less than it costs: docs/develop/kernels/sm90_backward.md.
inline bool prefers_one_tile(const FlashsciBackwardParams& p) {
  int64_t rows = p.seq_q;
  if (p.window_left >= 0 && p.window_right >= 0)
    rows = std::min<int64_t>(rows, int64_t{p.window_left} + p.window_right + 128);
  else if (p.window_left >= 0 || p.window_right >= 0)
    rows /= 2;
  return rows * (p.heads_q / p.heads_k) > 4096;
}

template <class Op, class C, bool kVarlen, bool kSoftcap>
cudaError_t launch_backward_tiling(const FlashsciBackwardParams& p, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(BackwardStorage<C>) + (C::kHasBiasMask ? 0 : 1024);
  static_assert(kSharedBytes <= 227 * 1024, "the shared memory of an SM");
  BackwardArgs a;
  a.p = p;
  const int64_t heads = p.batch0 * p.batch1 * p.heads_q;
  const int64_t key_heads = p.batch0 * p.batch1 * p.heads_k;
  const int64_t q_tiles = query_tiles<C>(p);
  const int64_t k_tiles = num_tiles(p.seq_k, C::kBlockK, p.num_seqs, kVarlen);
  if (heads * q_tiles > INT32_MAX / 2 || key_heads * k_tiles > INT32_MAX / 2)
    return cudaErrorNotSupported;
  a.q_tiles = static_cast<uint32_t>(q_tiles);
  a.k_tiles = static_cast<uint32_t>(k_tiles);
  a.key_heads = static_cast<uint32_t>(key_heads);
  // Causal tiles differ in length: the longest first, among heads whose Q, dO and dQ fit L2.
  const bool causal = p.window_right >= 0 && p.window_left < 0;
  const int64_t head_bytes =
      int64_t{p.seq_q} * (C::kHeadDim * 6 + C::kHeadDimV * 2) * (p.heads_q / p.heads_k);
  a.group = causal && !kVarlen ? static_cast<uint32_t>(std::min<int64_t>(
                                     std::max<int64_t>((32 << 20) / head_bytes, 1), key_heads))
                               : 1;
  const int64_t rows = heads * q_tiles * C::kBlockQ;
  auto* space = static_cast<unsigned char*>(p.workspace);
  a.lse = reinterpret_cast<float*>(space);
  a.delta = reinterpret_cast<float*>(space + padded(rows * 4));
  a.dq = reinterpret_cast<float*>(space + 2 * padded(rows * 4));
  int* const after = reinterpret_cast<int*>(a.dq + rows * C::kHeadDim);
  a.handed_out = reinterpret_cast<uint32_t*>(after);
  a.ascending = after + 1;
  a.dq_semaphores = p.deterministic ? after + 2 : nullptr;
  // In turns the shortest causal tiles go first: the turn of each has come when it begins.
  a.descending = a.dq_semaphores != nullptr && causal;
  a.dout_row_offset = p.dout == nullptr ? p.seq_q : 0;
  a.exp_scale = p.scale * kLog2e;
  a.cap_inner = p.softcap != 0.f ? p.scale / p.softcap : 0.f;
  a.cap_outer = p.softcap * kLog2e;

  const int64_t tiles = key_heads * k_tiles;
  const uint32_t ctas = static_cast<uint32_t>(
      C::kManyTiles ? std::min<int64_t>(tiles, processors_of(p.device)) : tiles * C::kCtas);
  a.known = a.dq_semaphores != nullptr && ctas < tiles ? 0 : ctas;

  constexpr MapElement k16Bit = Op::kIsBf16 ? kBfloat16 : kFloat16;
  cudaError_t error = cudaSuccess;
  const auto encode = [&](CUtensorMap& map, const void* base, const FlashsciStrides& strides,
                          int64_t count, int64_t heads_of, int columns, int box_rows) {
    if (error == cudaSuccess && base != nullptr)
      error = encode_map(&map, base, k16Bit, columns,
                         dense_dims(strides, count, heads_of, p.batch1, p.batch0),
                         C::KBox::kColumns, box_rows);
  };
  const auto encode_loads = [&](CUtensorMap& map, CUtensorMap& cut, CUtensorMap& row,
                                const void* base, const FlashsciStrides& strides, int64_t count,
                                int64_t heads_of, int columns, int box_rows) {
    encode(map, base, strides, count, heads_of, columns, box_rows);
    if constexpr (kVarlen) {
      encode(row, base, strides, count, heads_of, columns, Box<1>::kRows);
      if (error == cudaSuccess)
        error =
            encode_map(&cut, base, k16Bit, columns, cut_dims(strides, count, heads_of, box_rows),
                       C::KBox::kColumns, box_rows);
    }
  };
  encode_loads(a.q, a.q_cut, a.q_row, p.q, p.q_strides, p.seq_q, p.heads_q, p.head_dim,
               C::QBox::kRows);
  encode_loads(a.dout, a.dout_cut, a.dout_row, p.dout != nullptr ? p.dout : p.out,
               p.dout != nullptr ? p.dout_strides : p.out_strides, p.seq_q, p.heads_q, p.head_dim_v,
               C::QBox::kRows);
  encode_loads(a.k, a.k_cut, a.k_row, p.k, p.k_strides, p.seq_k, p.heads_k, p.head_dim,
               C::KBox::kRows);
  encode_loads(a.v, a.v_cut, a.v_row, p.v, p.v_strides, p.seq_k, p.heads_k, p.head_dim_v,
               C::KBox::kRows);
  encode(a.dk, p.dk, p.dk_strides, p.seq_k, p.heads_k, p.head_dim, C::StoreBox::kRows);
  encode(a.dv, p.dv, p.dv_strides, p.seq_k, p.heads_k, p.head_dim_v, C::StoreBox::kRows);
  if constexpr (C::kHasBiasMask) {
    if (error == cudaSuccess) error = encode_bias_mask<C>(a, k16Bit);
  }
  if (error != cudaSuccess) return error;

  // The kernels before and after it do not depend on its tiles.
  using Rows =
      std::conditional_t<C::kD256, C, BackwardTiling<C::kHeadDim, C::kHeadDimV, C::kBlockQ>>;
  constexpr auto kernel = backward_kernel<Op, C, kVarlen, kSoftcap>;
  error = allow_shared<kernel>(kSharedBytes, p.device);
  if (error != cudaSuccess) return error;
  if constexpr (C::kHasBiasMask) {
    if (a.stores_bias) error = clear_bias(p, stream);
    if (error != cudaSuccess) return error;
  }
  const uint32_t row_blocks = static_cast<uint32_t>(heads * q_tiles);
  error =
      start<backward_preprocess_kernel<Op, Rows, kVarlen>>(row_blocks, kRowThreads, 0, stream, a);
  if (error == cudaSuccess)
    error = launch_in_clusters<kernel, C::kCtas>(true, ctas, C::kThreads, kSharedBytes, stream, a);
  if (error != cudaSuccess || p.dq == nullptr) return error;
  return launch_dependent<backward_postprocess_kernel<Op, Rows, kVarlen>>(row_blocks, kRowThreads,
                                                                          0, stream, a);
}

// The tile shapes, by padded head dims of q and k, and of v; reasons:
// docs/develop/kernels/sm90_backward.md.
constexpr int rows_of_block(int head_dim, int head_dim_v) {
  return head_dim == 64 && head_dim_v == 64 ? 128 : 64;
}
template <int kHeadDim, int kHeadDimV, bool kSoftcap>
using BackwardTile = std::conditional_t<
    (kHeadDim > 128 || kHeadDimV > 128), D256BackwardTiling<kHeadDim, kHeadDimV>,
    BackwardTiling<kHeadDim, kHeadDimV, kSoftcap ? 64 : rows_of_block(kHeadDim, kHeadDimV),
                   BiasMaskTiles::kNone, true>>;
template <int kHeadDim, int kHeadDimV>
using OneTile = BackwardTiling<kHeadDim, kHeadDimV, 64>;
template <int kHeadDim, int kHeadDimV>
using AliasedBiasTile = BackwardTiling<kHeadDim, kHeadDimV, rows_of_block(kHeadDim, kHeadDimV),
                                       BiasMaskTiles::kAliased>;
// With a softcap: one of few, since such calls are rare.
template <int kHeadDim, int kHeadDimV>
using CappedBiasTile = std::conditional_t<kHeadDim == 64 && kHeadDimV == 64,
                                          BackwardTiling<64, 64, 64, BiasMaskTiles::kAliased>,
                                          BackwardTiling<128, 128, 64, BiasMaskTiles::kAliased>>;
template <int kHeadDim, int kHeadDimV>
using StagedBiasTile = BackwardTiling<kHeadDim, kHeadDimV, 64, BiasMaskTiles::kStaged>;

// Calls work(head dim, head dim of v), padded, as constants.
template <class Work>
auto with_head_dims(const FlashsciBackwardParams& p, const Work& work) {
#if defined(FLASHSCI_SM90_ONLY)  // experiments: one pair of head dims compiles in seconds
#if !defined(FLASHSCI_SM90_ONLY_V)
#define FLASHSCI_SM90_ONLY_V FLASHSCI_SM90_ONLY
#endif
  return work(Columns<FLASHSCI_SM90_ONLY>(), Columns<FLASHSCI_SM90_ONLY_V>());
#else
  const int dim = p.head_dim, dim_v = p.head_dim_v;
  if (dim > 192 || (dim > 128 && dim_v > 192))
    return dim_v <= 128 ? work(Columns<256>(), Columns<128>())
                        : work(Columns<256>(), Columns<256>());
  if (dim > 128)
    return dim_v <= 128 ? work(Columns<192>(), Columns<128>())
                        : work(Columns<192>(), Columns<192>());
  if (dim_v > 128) return work(Columns<128>(), Columns<256>());
  if (dim <= 64 && dim_v <= 64) return work(Columns<64>(), Columns<64>());
  if (dim <= 64) return work(Columns<64>(), Columns<128>());
  if (dim_v <= 64) return work(Columns<128>(), Columns<64>());
  if (dim <= 96 && dim_v <= 96) return work(Columns<96>(), Columns<96>());
  return work(Columns<128>(), Columns<128>());
#endif
}

template <class Op, class C, bool kSoftcap = false>
cudaError_t launch_bias_mask(const FlashsciBackwardParams& p, cudaStream_t stream) {
  const cudaError_t error = launch_backward_tiling<Op, C, false, kSoftcap>(p, stream);
  return error == cudaSuccess && sums_bias(p) ? sum_bias<Op>(p, padded(workspace_of<C>(p)), stream)
                                              : error;
}

template <class Op, class C>
int64_t bias_mask_workspace(const FlashsciBackwardParams& p) {
  const int64_t own = workspace_of<C>(p);
  if (!sums_bias(p)) return own;
  const FlashsciBackwardParams bias = bias_alone(p);
  return padded(own) + Op::bias_gradient_workspace(&bias);
}

template <class Op, int kHeadDim, int kHeadDimV>
cudaError_t launch_backward_padded(const FlashsciBackwardParams& p, cudaStream_t stream) {
  using Plain = BackwardTile<kHeadDim, kHeadDimV, false>;
#if defined(FLASHSCI_SM90_PLAIN)  // experiments: one instance
  return launch_backward_tiling<Op, Plain, false, false>(p, stream);
#else
  using Softcap = BackwardTile<kHeadDim, kHeadDimV, true>;
  if (p.cu_seqlens_q != nullptr)
    return p.softcap != 0.f ? launch_backward_tiling<Op, Softcap, true, true>(p, stream)
                            : launch_backward_tiling<Op, Plain, true, false>(p, stream);
  if constexpr (!Plain::kD256) {
    if (has_staged_bias_mask(p))
      return launch_bias_mask<Op, StagedBiasTile<kHeadDim, kHeadDimV>>(p, stream);
    if (has_bias_mask(p))
      return p.softcap != 0.f
                 ? launch_bias_mask<Op, CappedBiasTile<kHeadDim, kHeadDimV>, true>(p, stream)
                 : launch_bias_mask<Op, AliasedBiasTile<kHeadDim, kHeadDimV>>(p, stream);
    if constexpr (!Plain::kNarrow) {
      if (p.softcap == 0.f && (p.deterministic || prefers_one_tile(p)))
        return launch_backward_tiling<Op, OneTile<kHeadDim, kHeadDimV>, false, false>(p, stream);
    }
  }
  return p.softcap != 0.f ? launch_backward_tiling<Op, Softcap, false, true>(p, stream)
                          : launch_backward_tiling<Op, Plain, false, false>(p, stream);
#endif
}

template <class Op, int kHeadDim, int kHeadDimV>
int64_t padded_workspace(const FlashsciBackwardParams& p) {
  using Plain = BackwardTile<kHeadDim, kHeadDimV, false>;
  if constexpr (!Plain::kD256) {
    if (has_staged_bias_mask(p))
      return bias_mask_workspace<Op, StagedBiasTile<kHeadDim, kHeadDimV>>(p);
    if (has_bias_mask(p))
      return p.softcap != 0.f ? bias_mask_workspace<Op, CappedBiasTile<kHeadDim, kHeadDimV>>(p)
                              : bias_mask_workspace<Op, AliasedBiasTile<kHeadDim, kHeadDimV>>(p);
  }
  return p.softcap != 0.f ? workspace_of<BackwardTile<kHeadDim, kHeadDimV, true>>(p)
                          : workspace_of<Plain>(p);
}

template <class Op>
int64_t backward_workspace(const FlashsciBackwardParams& p) {
  const int64_t own = with_head_dims(
      p, [&](auto dim, auto dim_v) { return padded_workspace<Op, dim.value, dim_v.value>(p); });
  // The triangle backward refuses some calls by their addresses, which are unknown here.
  return triangle_bwd::takes(p) ? std::max(own, triangle_bwd::workspace(p)) : own;
}

// cudaErrorNotSupported: another kernel must serve this call; nothing was launched.
template <class Op>
cudaError_t launch_backward(const FlashsciBackwardParams& p, cudaStream_t stream) {
  const cudaError_t triangle = triangle_bwd::launch<Op>(p, stream);
  if (triangle != cudaErrorNotSupported) return triangle;
  const auto aligned = [&](const void* base, const FlashsciStrides& s, int64_t heads,
                           int64_t rows) {
    const auto whole = [](int64_t size, int64_t stride) { return size <= 1 || stride % 8 == 0; };
    return reinterpret_cast<uintptr_t>(base) % 16 == 0 && whole(p.batch0, s.batch0) &&
           whole(p.batch1, s.batch1) && whole(heads, s.head) && whole(rows, s.row);
  };
  if (p.head_dim > 256 || p.head_dim_v > 256 || p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0 ||
      p.seq_q == 0 || p.seq_k == 0 || !takes_bias_mask(p) ||
      p.softcap * kLog2e > kLargeExponent ||  // with a softcap P is not limited for such scores
      !aligned(p.out, p.out_strides, p.heads_q, p.seq_q) ||
      !aligned(p.dout, p.dout_strides, p.heads_q, p.seq_q) ||
      !aligned(p.dq, p.dq_strides, p.heads_q, p.seq_q) ||
      !aligned(p.dk, p.dk_strides, p.heads_k, p.seq_k) ||
      !aligned(p.dv, p.dv_strides, p.heads_k, p.seq_k))
    return cudaErrorNotSupported;
  return with_head_dims(p, [&](auto dim, auto dim_v) {
    return launch_backward_padded<Op, dim.value, dim_v.value>(p, stream);
  });
}

}  // namespace flashsci::sm90::bwd
