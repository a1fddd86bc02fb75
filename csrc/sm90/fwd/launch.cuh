// The host side of the sm90 forward: tile shapes, tensor maps, the order of the tiles, and the
// choice of the kernel.
#pragma once
#include <cuda_runtime.h>
#include <algorithm>
#include <cstdint>
#include <numeric>

#include "../../core/launch.cuh"
#include "../../core/softmax.cuh"
#include "../../include/flashsci.h"
#include "../decode/launch.cuh"
#include "../tma_map.h"
#include "../triangle_fwd/launch.cuh"
#include "config.cuh"
#include "kernel.cuh"
#include "launch_scheduled.cuh"

namespace flashsci::sm90::fwd {

// Whether a call has a bias of neighbouring keys that TMA refuses: it, or a row of it, begins at no
// multiple of 16 bytes.
inline bool begins_anywhere(const FlashsciForwardParams& p) {
  const FlashsciScoreStrides& s = p.bias_mask.bias_strides;
  const int each = p.bias_mask.bias_is_fp32 ? 4 : 8;
  const auto whole = [=](int64_t size, int64_t stride) { return size <= 1 || stride % each == 0; };
  return p.bias_mask.bias != nullptr && s.column == 1 &&
         !(reinterpret_cast<uintptr_t>(p.bias_mask.bias) % 16 == 0 && whole(p.seq_q, s.row) &&
           whole(p.heads_q, s.head) && whole(p.batch1, s.batch1) && whole(p.batch0, s.batch0));
}

// Encodes the maps of such a bias and plans its boxes: load_bias_mask.cuh.
template <class C>
cudaError_t plan_lattice(ForwardArgs& a, const MapElement& element) {
  const FlashsciForwardParams& p = a.p;
  const FlashsciScoreStrides& s = p.bias_mask.bias_strides;
  BiasMaskPlan& plan = a.bias_mask;
  const int64_t size[4] = {p.seq_q, p.heads_q, p.batch1, p.batch0};
  int64_t stride[4] = {s.row, s.head, s.batch1, s.batch0};
  for (int i = 0; i < 4; ++i)
    if (size[i] == 1) stride[i] = 0;
  int64_t pitch = stride[0] != 0 ? stride[0] : std::gcd(stride[1], std::gcd(stride[2], stride[3]));
  if (pitch == 0) pitch = p.seq_k;  // a single row
  constexpr int64_t kMost = 1 << 30;
  int64_t last = 0;  // flat row
  for (int i = 0; i < 4; ++i) {
    const int64_t rows = stride[i] / pitch;
    if (stride[i] < 0 || stride[i] % pitch != 0 || rows > kMost) return cudaErrorNotSupported;
    plan.rows[i] = static_cast<int>(rows);
    last += (size[i] - 1) * rows;
  }
  if (!C::kHasLattice || last > kMost) return cudaErrorNotSupported;

  const bool fp32 = element.bytes == 4;
  const int classes = 1 << lattice_bits(fp32), row_bytes = lattice_row_bytes<C>(fp32);
  plan.boxes = stride[0] == 0 ? 1 : classes;
  const int box_rows = stride[0] == 0 ? 1 : C::kBlockQ / classes + classes - 1;
  plan.box_step = (box_rows * row_bytes + 127) / 128 * 128;
  plan.stage_bytes = (plan.boxes * plan.box_step + 1023) / 1024 * 1024;
  plan.loaded = plan.boxes * box_rows * row_bytes;
  const auto base = reinterpret_cast<uintptr_t>(p.bias_mask.bias);
  plan.base = base % 16, plan.pitch = pitch * element.bytes % 16;
  for (int i = 0; i < classes; ++i) {
    const int64_t first = std::min<int64_t>(i, last);  // some row if the class has none
    const uintptr_t address = base + first * pitch * element.bytes;
    const int before = address % 16 / element.bytes;
    const int columns = (before + p.seq_k + classes - 1) / classes * classes;
    const MapDims dims = {{(last - first) / classes + 1, 1, 1, 1}, {classes * pitch, 0, 0, 0}};
    const cudaError_t error =
        encode_map(&a.bias[i], reinterpret_cast<const void*>(address / 16 * 16), element, columns,
                   dims, row_bytes / element.bytes, box_rows);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class Op, class C, bool kWindowed, bool kPlainScores, bool kVarlen>
cudaError_t launch_tiling(ForwardArgs& a, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(SharedStorage<C>) + 1024;  // the base is aligned by hand
  static_assert(kSharedBytes <= 227 * 1024, "the shared memory of an SM");
  const FlashsciForwardParams& p = a.p;
  if (p.batch0 * p.batch1 * p.heads_q == 0 || p.seq_q == 0) return cudaSuccess;
  const int processors = processors_of(p.device);
  if (processors <= 0) return cudaErrorInvalidDevice;
  cudaError_t error = plan_schedule<C, kVarlen>(a.schedule, p, processors, 2);
  if (error != cudaSuccess) return error;

  using KBox = typename C::KBox;
  constexpr MapElement k16Bit = Op::kIsBf16 ? kBfloat16 : kFloat16;
  const auto encode = [&](CUtensorMap* map, const void* base, const FlashsciStrides& strides,
                          int64_t rows, int64_t heads_of, int head_dim, int box_rows) {
    return encode_map(map, base, k16Bit, head_dim,
                      dense_dims(strides, rows, heads_of, p.batch1, p.batch0), KBox::kColumns,
                      box_rows);
  };
  error = encode(&a.q, p.q, p.q_strides, p.seq_q, p.heads_q, p.head_dim, C::QBox::kRows);
  if (error == cudaSuccess)
    error = encode(&a.k, p.k, p.k_strides, p.seq_k, p.heads_k, p.head_dim, KBox::kRows);
  if (error == cudaSuccess)
    error = encode(&a.v, p.v, p.v_strides, p.seq_k, p.heads_k, p.head_dim_v, KBox::kRows);
  if (error == cudaSuccess)
    error =
        encode(&a.out, p.out, p.out_strides, p.seq_q, p.heads_q, p.head_dim_v, C::OutBox::kRows);
  if (kVarlen && error == cudaSuccess)
    error = encode(&a.v_row, p.v, p.v_strides, p.seq_k, p.heads_k, p.head_dim_v, Box<1>::kRows);
  if (kVarlen && error == cudaSuccess)
    error = encode_map(&a.v_cut, p.v, k16Bit, p.head_dim_v,
                       cut_dims(p.v_strides, p.seq_k, p.heads_k, KBox::kRows), KBox::kColumns,
                       KBox::kRows);
  if constexpr (C::kHasBiasMask) {
    BiasMaskPlan& plan = a.bias_mask;
    plan = {};
    const auto encode_bias_mask = [&](CUtensorMap* map, const void* base, const MapElement& element,
                                      const FlashsciScoreStrides& s, int box_keys, int* box_rows,
                                      int* step) {
      if (error != cudaSuccess || base == nullptr) return;
      *box_rows = s.row == 0 ? 1 : 64;
      const int boxes = C::kBlockK / box_keys;
      const int box_bytes = std::max(1024, *box_rows * box_keys * element.bytes);
      const int consumers = *box_rows == 1 ? 1 : C::kConsumers;
      *step = *box_rows == 1 ? 0 : boxes * box_bytes;
      if (element.bytes == 4) plan.box_step = box_bytes;
      plan.stage_bytes += consumers * boxes * box_bytes;
      plan.loaded += consumers * boxes * (*box_rows * box_keys * element.bytes);
      const MapDims dims = {{p.seq_q, p.heads_q, p.batch1, p.batch0},
                            {s.row, s.head, s.batch1, s.batch0}};
      error = s.column == 1 ? encode_map(map, base, element, p.seq_k, dims, box_keys, *box_rows)
                            : cudaErrorNotSupported;
    };
    const bool fp32 = p.bias_mask.bias_is_fp32;
    const MapElement element = fp32 ? kFloat32 : k16Bit;
    if (begins_anywhere(p)) {
      if (error == cudaSuccess) error = plan_lattice<C>(a, element);
    } else {
      encode_bias_mask(a.bias, p.bias_mask.bias, element, p.bias_mask.bias_strides,
                       bias_box_keys<C>(fp32), &plan.bias_rows, &plan.bias_step);
    }
    plan.mask = plan.stage_bytes;
    encode_bias_mask(&a.mask, p.bias_mask.mask, kByte, p.bias_mask.mask_strides, C::kBlockK,
                     &plan.mask_rows, &plan.mask_step);
    plan.stages = std::min(kBiasMaskStages, C::kBiasMaskBytes / std::max(plan.stage_bytes, 1));
    if (plan.stages < 2) return cudaErrorNotSupported;  // rows of fp32 anywhere and a mask of pairs
  }
  if (error != cudaSuccess) return error;

  constexpr auto kernel = forward_kernel<Op, C, kWindowed, kPlainScores, kVarlen>;
  return launch_scheduled<kernel, C, kVarlen>(a, kSharedBytes, processors, stream);
}

// The tile shapes, by padded head dims of q and k, and of v; reasons:
// docs/develop/kernels/sm90_forward.md.
template <int kHeadDim, int kHeadDimV = kHeadDim>
struct Tiles;
template <>
struct Tiles<32> {  // in boxes of 64 columns, half of them zeros
  using WithBiasMask = Tiling<32, 64, 3, 2, true>;
  using WideWithBias = Tiling<32, 64, 4, 2, true>;  // of 256 rows, for 16 bits: stages of 32 KiB
};
template <>
struct Tiles<64> {
  using Plain = Tiling<64, 128, 3, 4>;
  using Wide = Tiling<64, 64, 4, 8>;  // of 256 rows
  using WithBiasMask = Tiling<64, 64, 3, 2, true>;
};
template <>
struct Tiles<96> {
  using Plain = Tiling<96, 96, 3, 2>;
};
template <>
struct Tiles<128> {
  using Plain = Tiling<128, 128, 2, 2>;
  using WithBiasMask = Tiling<128, 64, 2, 2, true>;
};
template <>
struct Tiles<192> {
  using Plain = Tiling<192, 96, 2, 2>;
};
template <>
struct Tiles<192, 128> {
  using Plain = Tiling<192, 128, 2, 2, false, 128>;
};
template <>
struct Tiles<256> {
  using Plain = Tiling<256, 64, 2, 2>;
  using WithBiasMask = Tiling<256, 32, 2, 2, true>;
};

inline bool is_windowed(const FlashsciForwardParams& p) {
  return p.window_left >= 0 || p.window_right >= 0;
}

// Whether wide tiles are better: a row takes the same time in both shapes, and the last rows of a
// sequence, or of a GPU's last wave, count as whole tiles. (Long causal calls are slower with wide
// tiles: the diagonal cuts more blocks.)
template <class Narrow, class Wide>
bool suits_wide_tiles(const FlashsciForwardParams& p) {
  if (is_windowed(p) && p.seq_k > 1024) return false;
  const int64_t heads = p.batch0 * p.batch1 * p.heads_q;
  const int64_t processors = std::max(processors_of(p.device), 1);
  const auto rows = [&](int64_t tile) {
    const int64_t tiles = heads * ((p.seq_q + tile - 1) / tile);
    return (tiles + processors - 1) / processors * tile;
  };
  return rows(Wide::kBlockQ) <= rows(Narrow::kBlockQ);
}

template <class Op, class C>
cudaError_t launch_plain(ForwardArgs& a, cudaStream_t stream) {
  const bool windowed = is_windowed(a.p);
  const bool plain = a.scores.mode == kScaled;
  if (a.p.cu_seqlens_q != nullptr)
    return plain ? launch_tiling<Op, C, true, true, true>(a, stream)
                 : launch_tiling<Op, C, true, false, true>(a, stream);
  if (!plain) return launch_tiling<Op, C, true, false, false>(a, stream);
  if constexpr (C::kHeadDim == 64) {
    using Wide = Tiles<64>::Wide;
    if (suits_wide_tiles<C, Wide>(a.p))
      return windowed ? launch_tiling<Op, Wide, true, true, false>(a, stream)
                      : launch_tiling<Op, Wide, false, true, false>(a, stream);
  }
  if (windowed) return launch_tiling<Op, C, true, true, false>(a, stream);
  return launch_tiling<Op, C, false, true, false>(a, stream);
}

template <class Op, int kHeadDim>
cudaError_t launch_bias_mask(ForwardArgs& a, cudaStream_t stream) {
  using C = typename Tiles<kHeadDim>::WithBiasMask;
  if (a.p.cu_seqlens_q != nullptr) return cudaErrorNotSupported;
  if constexpr (kHeadDim == 32) {
    using Wide = Tiles<32>::WideWithBias;
    if (!a.p.bias_mask.bias_is_fp32 && !begins_anywhere(a.p) && suits_wide_tiles<C, Wide>(a.p))
      return launch_tiling<Op, Wide, true, false, false>(a, stream);
  }
  return launch_tiling<Op, C, true, false, false>(a, stream);
}

// Bytes of workspace: partial results of a decoding call, the counter of the schedule, or a copy of
// the bias.
inline int64_t forward_workspace(const FlashsciForwardParams& p) {
  if (const int64_t bytes = triangle_fwd::workspace(p)) return bytes;
  if (decode::is_decoding(p)) return decode::decode_workspace(p);
  const bool causal = p.window_right >= 0 && p.window_left < 0;
  return causal || p.cu_seqlens_q != nullptr ? sizeof(uint32_t) : 0;
}

// cudaErrorNotSupported: another kernel must serve this call; nothing was launched.
template <class Op>
cudaError_t launch_forward(const FlashsciForwardParams& p, cudaStream_t stream) {
  const auto aligned = [](int64_t size, int64_t stride) { return size <= 1 || stride % 8 == 0; };
  const int dim = std::max(p.head_dim, p.head_dim_v);
  if (dim > 256 || p.seq_k == 0 || p.head_dim_v % 8 != 0 ||
      !aligned(p.batch0, p.out_strides.batch0) || !aligned(p.batch1, p.out_strides.batch1) ||
      !aligned(p.heads_q, p.out_strides.head) || !aligned(p.seq_q, p.out_strides.row) ||
      reinterpret_cast<uintptr_t>(p.out) % 16 != 0)
    return cudaErrorNotSupported;
  ForwardArgs a;
  a.p = p;
  const bool bias_mask = p.bias_mask.bias != nullptr || p.bias_mask.mask != nullptr;
  const cudaError_t error = triangle_fwd::launch<Op>(p, stream);
  if (error != cudaErrorNotSupported) return error;
  a.scores = plan_scores(p.scale, p.softcap, p.scale > 0.f && !bias_mask);
  // sm80's kernel skips blocks that a mask hides and reads a bias once for two batch rows: measured
  // faster for these calls, and only for them.
  if (p.bias_mask.mask != nullptr && dim <= 32) return cudaErrorNotSupported;
  if (bias_mask)
    return dim <= 32    ? launch_bias_mask<Op, 32>(a, stream)
           : dim <= 64  ? launch_bias_mask<Op, 64>(a, stream)
           : dim <= 128 ? launch_bias_mask<Op, 128>(a, stream)
                        : launch_bias_mask<Op, 256>(a, stream);
  if (p.workspace != nullptr && decode::is_decoding(p)) {
    const cudaError_t decoded = dim <= 64    ? decode::launch_decode<Op, 64>(a, stream)
                                : dim <= 128 ? decode::launch_decode<Op, 128>(a, stream)
                                             : decode::launch_decode<Op, 256>(a, stream);
    if (decoded != cudaErrorNotSupported) return decoded;
  }
  const auto launch = [&](auto tiles) {
    return launch_plain<Op, typename decltype(tiles)::Plain>(a, stream);
  };
  if (dim <= 64) return launch(Tiles<64>{});
  if (dim <= 96) return launch(Tiles<96>{});
  if (dim <= 128) return launch(Tiles<128>{});
  if (dim <= 192 && p.head_dim_v <= 128) return launch(Tiles<192, 128>{});
  return dim <= 192 ? launch(Tiles<192>{}) : launch(Tiles<256>{});
}

}  // namespace flashsci::sm90::fwd
