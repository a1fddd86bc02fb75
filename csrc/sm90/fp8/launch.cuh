// The host side of the sm90 forward on 8-bit floats: tile shapes, tensor maps, the order of the
// tiles, and the choice of the kernel.
#pragma once
#include <cuda_runtime.h>
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../../core/launch.cuh"
#include "../../include/flashsci_fp8.h"
#include "../fwd/launch_scheduled.cuh"
#include "../tma_map.h"
#include "config.cuh"
#include "kernel.cuh"

namespace flashsci::sm90::fp8 {

// The cost for a CTA to begin and end a piece, in blocks of keys.
inline constexpr int64_t kPieceBlocks = 8;

// The last tiles of a call that are cut into pieces: those of an incomplete wave, if all rows see
// all keys, each CTA gets at least one block, and the cut pays.
template <class C>
SplitTail split_tail_of(const FlashsciForwardParams& p, int64_t processors) {
  const int64_t tiles = p.batch0 * p.batch1 * p.heads_q * num_tiles(p.seq_q, C::kBlockQ, 0, false);
  const int64_t blocks = (int64_t{p.seq_k} + C::kBlockK - 1) / C::kBlockK;
  const int64_t rest = tiles % processors;
  if (p.cu_seqlens_q != nullptr || p.window_left >= 0 || p.window_right >= 0 || rest == 0 ||
      rest * blocks < processors || rest * blocks > INT32_MAX / (processors + 1) ||
      rest * blocks / processors + kPieceBlocks >= blocks)
    return {};
  return {static_cast<uint32_t>(rest), static_cast<uint32_t>(blocks)};
}

// Bytes of the workspace parts for the pieces of the tail.
template <class C>
struct SplitTailParts {
  int64_t arrived, sums;
  SplitTailParts(const SplitTail& tail, int64_t processors)
      : arrived((tail.tiles * C::kConsumers * 4 * int64_t{sizeof(uint32_t)} + 255) / 256 * 256),
        sums(tail.tiles == 0 ? 0
                             : processors * 2 * C::kConsumers * 4 * kPieceWords<C> * 32 *
                                   static_cast<int64_t>(sizeof(float4))) {}
};

template <class C>
cudaError_t encode_maps(Args& a) {
  const FlashsciForwardParams& p = a.p;
  const auto encode = [&](CUtensorMap* map, const void* base, const FlashsciStrides& strides,
                          int64_t rows, int64_t heads, int columns, auto box,
                          const MapElement& element) {
    using B = decltype(box);
    return encode_map(map, base, element, columns,
                      dense_dims(strides, rows, heads, p.batch1, p.batch0), B::kColumns, B::kRows);
  };
  cudaError_t error =
      encode(&a.q, p.q, p.q_strides, p.seq_q, p.heads_q, p.head_dim, typename C::QBox{}, kByte);
  if (error == cudaSuccess)
    error =
        encode(&a.k, p.k, p.k_strides, p.seq_k, p.heads_k, p.head_dim, typename C::KBox{}, kByte);
  if (error == cudaSuccess)
    error =
        encode(&a.v, p.v, p.v_strides, p.seq_k, p.heads_k, p.head_dim_v, typename C::VBox{}, kByte);
  if (error == cudaSuccess)
    error = encode(&a.out, p.out, p.out_strides, p.seq_q, p.heads_q, p.head_dim_v,
                   typename C::OutBox{}, a.out_is_fp16 ? kFloat16 : kBfloat16);
  return error;
}

template <class C, bool kVarlen>
cudaError_t launch_tiling(Args& a, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(Storage<C>) + 1024;  // the base is aligned by hand
  static_assert(kSharedBytes <= 227 * 1024, "the shared memory of an SM");
  const int processors = processors_of(a.p.device);
  if (processors <= 0) return cudaErrorInvalidDevice;
  cudaError_t error = fwd::plan_schedule<C, kVarlen>(a.schedule, a.p, processors, 1);
  if (error == cudaSuccess) error = encode_maps<C>(a);
  if (error != cudaSuccess) return error;
  if (!kVarlen && a.p.workspace != nullptr) a.tail = split_tail_of<C>(a.p, processors);
  if (a.tail.tiles != 0) {
    const SplitTailParts<C> parts(a.tail, processors);
    auto* workspace = static_cast<unsigned char*>(a.p.workspace);
    a.tail.arrived = reinterpret_cast<uint32_t*>(workspace);
    a.tail.sums = reinterpret_cast<float4*>(workspace + parts.arrived);
    a.schedule.items -= a.tail.tiles;
    error = clear_memory(workspace, parts.arrived, stream);
    if (error != cudaSuccess) return error;
  }
  constexpr auto kernel = fp8_forward_kernel<C, kVarlen>;
  return fwd::launch_scheduled<kernel, C, kVarlen>(a, kSharedBytes, processors, stream,
                                                   a.tail.tiles != 0 ? processors : 0);
}

// The tile shapes, by padded head dims of q and k, and of v; reasons:
// docs/develop/kernels/sm90_fp8.md. Scales per 64 keys, or an accumulator of 256 columns, take
// blocks of 64 keys.
using Tiles64 = Tiling<64, 64, 128, 3, 4>;
using Tiles64Wide = Tiling<64, 64, 128, 4, 4>;  // of 256 rows; dense only, for lack of registers
using Tiles64Fine = Tiling<64, 64, 64, 3, 4>;
using Tiles128 = Tiling<128, 128, 128, 3, 2>;
using Tiles128Fine = Tiling<128, 128, 64, 3, 2>;
using Tiles192 = Tiling<192, 128, 128, 2, 2>;
using Tiles192Fine = Tiling<192, 128, 64, 2, 4>;
using Tiles256 = Tiling<256, 256, 64, 2, 2>;
using Tiles256Fast = Tiling<256, 256, 128, 2, 2, true>;

// The cost of a call for a CTA, in query rows. The last rows of a sequence count as a whole tile,
// and so do those of the last wave unless it is cut into pieces.
template <class C>
double rows_of_cta(const FlashsciForwardParams& p, int64_t processors) {
  const int64_t tiles = p.batch0 * p.batch1 * p.heads_q * num_tiles(p.seq_q, C::kBlockQ, 0, false);
  const SplitTail tail = split_tail_of<C>(p, processors);
  const double waves = tail.tiles != 0 ? static_cast<double>(tiles) / processors +
                                             static_cast<double>(kPieceBlocks) / tail.blocks
                                       : (tiles + processors - 1) / processors;
  return waves * C::kBlockQ;
}

// Whether a call is for wide tiles: they must not waste more rows than narrow ones.
template <class Narrow, class Wide>
bool suits_wide_tiles(const FlashsciForwardParams& p) {
  if (p.cu_seqlens_q != nullptr) return false;
  const int64_t processors = std::max(processors_of(p.device), 1);
  return rows_of_cta<Wide>(p, processors) <= rows_of_cta<Narrow>(p, processors) * 1.02;
}

// Calls launch(tile shape) for a call.
template <class Launch>
auto with_tiles(const FlashsciFp8ForwardParams& params, const Launch& launch) {
  const FlashsciForwardParams& p = params.call;
  const int dim = std::max(p.head_dim, p.head_dim_v);
  const bool fine =
      std::min(params.k_scale.shift, params.v_scale.shift) < 7;  // 64 keys share a scale
  if (dim <= 64 && !fine && suits_wide_tiles<Tiles64, Tiles64Wide>(p)) return launch(Tiles64Wide{});
  if (dim <= 64) return fine ? launch(Tiles64Fine{}) : launch(Tiles64{});
  if (dim <= 128) return fine ? launch(Tiles128Fine{}) : launch(Tiles128{});
  if (dim <= 192 && p.head_dim_v <= 128) return fine ? launch(Tiles192Fine{}) : launch(Tiles192{});
  if (params.fast && !fine && params.v_scale.shift == FLASHSCI_ONE_SCALE)
    return launch(Tiles256Fast{});
  return launch(Tiles256{});
}

// Bytes of workspace: the counter of the schedule, or the sums of pieces.
inline int64_t forward_workspace(const FlashsciFp8ForwardParams& params) {
  const FlashsciForwardParams& p = params.call;
  const bool causal = p.window_right >= 0 && p.window_left < 0;
  if (causal || p.cu_seqlens_q != nullptr) return sizeof(uint32_t);
  return with_tiles(params, [&](auto tiles) {
    using C = decltype(tiles);
    const int processors = processors_of(p.device);
    const SplitTailParts<C> parts(split_tail_of<C>(p, processors), processors);
    return parts.arrived + parts.sums;
  });
}

// cudaErrorNotSupported: there is no kernel for this call; nothing was launched.
inline cudaError_t launch_forward(const FlashsciFp8ForwardParams& params, cudaStream_t stream) {
  const FlashsciForwardParams& p = params.call;
  const auto aligned = [](int64_t size, int64_t stride) { return size <= 1 || stride % 8 == 0; };
  const int dim = std::max(p.head_dim, p.head_dim_v);
  if (dim > 256 || p.head_dim_v % 8 != 0 || p.seq_k == 0 || p.seq_q == 0 || p.heads_q == 0 ||
      p.batch0 * p.batch1 == 0 || !aligned(p.batch0, p.out_strides.batch0) ||
      !aligned(p.batch1, p.out_strides.batch1) || !aligned(p.heads_q, p.out_strides.head) ||
      !aligned(p.seq_q, p.out_strides.row) || reinterpret_cast<uintptr_t>(p.out) % 16 != 0)
    return cudaErrorNotSupported;
  Args a{};
  a.p = p;
  a.q_scale = params.q_scale, a.k_scale = params.k_scale, a.v_scale = params.v_scale;
  a.out_is_fp16 = params.out_is_fp16;
  a.inverse_softcap = p.softcap != 0.f ? 1.f / p.softcap : 0.f;
  const auto launch = [&](auto tiles) {
    using C = decltype(tiles);
    if constexpr (!std::is_same_v<C, Tiles64Wide>)
      if (p.cu_seqlens_q != nullptr) return launch_tiling<C, true>(a, stream);
    return launch_tiling<C, false>(a, stream);
  };
  if (std::min({a.q_scale.shift, a.k_scale.shift, a.v_scale.shift}) < 6)
    return cudaErrorNotSupported;
  return with_tiles(params, launch);
}

}  // namespace flashsci::sm90::fp8
