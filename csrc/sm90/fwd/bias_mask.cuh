// Bias and mask in the sm90 forward. A separate producer (load_bias_mask.cuh) brings them, a box of
// 64 rows for each consumer (one row for all if all rows are the same); the consumer adds them to
// its accumulators.
//
// Shared  A stage: for each consumer the bias [64 rows][keys of a block] (fp32: 32 keys after the
//         other), then for each the mask [64 rows][keys], swizzled by the bytes of a row:
//         BiasMaskPlan. A bias whose rows begin anywhere is not swizzled and keeps the places in 16
//         bytes that its keys have in memory: load_bias_mask.cuh.
// Limits  Neighbouring keys are neighbours in memory, all other strides (0 too) are multiples of 16
//         bytes, as TMA wants; up to D 128 rows of a bias may begin anywhere on one lattice.
//         Other calls are left to sm80 (core/bias_mask.cuh).
#pragma once
#include <cstdint>

#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/shared.cuh"
#include "config.cuh"
#include "softmax.cuh"

namespace flashsci::sm90::fwd {

// The place that TMA gives 16-byte chunk `chunk` of row `row` in a box with rows of kBytes.
template <int kBytes>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  static_assert(kBytes == 128 || kBytes == 64 || kBytes == 32);
  return row * kBytes + (chunk ^ (row * kBytes >> 7 & (kBytes / 16 - 1))) * 16;
}

// In all functions below, s are the scores of a block of kKeys keys, or of its first half; element
// e of a lane is row 16 warp + lane / 4 + 8 ((e >> 1) & 1) and key 8 (e >> 2) + 2 (lane % 4) + (e &
// 1).

// Where a lane's first two keys are in the boxes of a bias whose rows begin anywhere: the byte of
// the word that holds the first of them, a multiple of 4, plus 1 if that is the upper half of the
// word, plus 2 if there is a row eight below. row: the lane's first in the tile. Instead of a row
// past the last one, where another head's may be, the lane reads one that is there.
template <class C>
__device__ __forceinline__ uint32_t place_on_lattice(const ForwardArgs& a, const TileInfo& tile,
                                                     int row) {
  const BiasMaskPlan& plan = a.bias_mask;
  const int fp32 = a.p.bias_mask.bias_is_fp32, bits = lattice_bits(fp32);
  const int last = plan.boxes == 1 ? 0 : min(C::kBlockQ, a.p.seq_q - tile.row) - 1;
  const int own = min(row, last), box = own & ((1 << bits) - 1);
  const uint32_t before = (plan.base + plan.flat_row(tile, tile.row + own) * plan.pitch) % 16;
  return box * plan.box_step + ((own >> bits) + box) * lattice_row_bytes<C>(fp32) +
         threadIdx.x % 4 * (fp32 ? 8 : 4) + before / 4 * 4 + before / 2 % 2 +
         (row + 8 <= last ? 2 : 0);
}

// s = inner s + bias; inner s is in units of the natural exponent. place: place_on_lattice.
template <class C, int kCount>
__device__ __forceinline__ void add_fp32(float (&s)[kCount], const BiasMaskPlan& plan, float inner,
                                         uint32_t bias, uint32_t place) {
  if (C::kHasLattice && plan.boxes > 0) {
    const uint32_t first = bias + (place & ~3u);
    const int below = place & 2 ? 2 * lattice_row_bytes<C>(true) : 0;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const uint32_t address = first + e / 4 * 32 + e / 2 % 2 * below + e % 2 * 4;
      s[e] = fmaf(s[e], inner, __uint_as_float(ptx::ld_shared(address)));
    }
    return;
  }
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  const int row = plan.bias_rows == 1 ? 0 : warp_row + lane / 4;  // row + 8 has the same swizzle
  const int below = plan.bias_rows == 1 ? 0 : 1024;
#pragma unroll
  for (int n = 0; n < kCount / 4; ++n) {  // 8 keys: a quarter of a box
    const int chunk = n % 4 * 2 + lane % 4 / 2;
    const uint32_t address =
        bias + n / 4 * plan.box_step + swizzled<128>(row, chunk) + lane % 2 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int e = n * 4 + half * 2;
      const float2 pair = ptx::ld_shared_f2(address + half * below);
      s[e] = fmaf(s[e], inner, pair.x);
      s[e + 1] = fmaf(s[e + 1], inner, pair.y);
    }
  }
}

// A bias of 16 bits, in the order of the scores, two in a word. place: place_on_lattice.
template <class C, int kWords>
__device__ __forceinline__ void fetch_16_bit(uint32_t (&words)[kWords], const BiasMaskPlan& plan,
                                             uint32_t bias, uint32_t place) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  if (C::kHasLattice && plan.boxes > 0) {
    const uint32_t first = bias + (place & ~3u), halves = place & 1 ? 0x5432 : 0x3210;
    const int below = place & 2 ? lattice_row_bytes<C>(false) : 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t address = first + i % 2 * below + i / 2 * 16;
      words[i] = __byte_perm(ptx::ld_shared(address), ptx::ld_shared(address + 4), halves);
    }
    return;
  }
  const int row = plan.bias_rows == 1 ? 0 : warp_row + lane % 16;
#pragma unroll
  for (int n = 0; n < kWords / 2; n += 2) {  // 16 keys
    uint32_t four[4];                        // keys 0 .. 7 of rows g and g + 8, keys 8 .. 15
    ptx::ldmatrix_x4(four, bias + swizzled<C::kBlockK * 2>(row, n + lane / 16));
#pragma unroll
    for (int i = 0; i < 4; ++i) words[n * 2 + i] = four[i];
  }
}

template <class Op, int kWords>
__device__ __forceinline__ void add_16_bit(float (&s)[2 * kWords], const uint32_t (&words)[kWords],
                                           float inner) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    s[2 * i] = fmaf(s[2 * i], inner, Op::to_float(static_cast<uint16_t>(words[i] & 0xffff)));
    s[2 * i + 1] = fmaf(s[2 * i + 1], inner, Op::to_float(static_cast<uint16_t>(words[i] >> 16)));
  }
}

// Hidden scores become -inf.
template <int kKeys, int kCount>
__device__ __forceinline__ void hide(float (&s)[kCount], const BiasMaskPlan& plan, uint32_t mask) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  if (plan.mask_rows == 1) {  // a mask of keys: in most blocks it hides nothing or everything
    const uint32_t shown = ptx::ld_shared_u16(mask + lane * 2 % kKeys);
    if (__all_sync(0xffffffffu, (shown & 0xff) != 0 && (shown & 0xff00) != 0)) return;
    if (__all_sync(0xffffffffu, shown == 0)) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) s[e] = -INFINITY;
      return;
    }
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
      const uint32_t both = ptx::ld_shared_u16(mask + n * 8 + lane % 4 * 2);
      if ((both & 0xff) == 0) s[n * 4] = s[n * 4 + 2] = -INFINITY;
      if ((both & 0xff00) == 0) s[n * 4 + 1] = s[n * 4 + 3] = -INFINITY;
    }
    return;
  }
  const int row = warp_row + lane / 4;
#pragma unroll
  for (int n = 0; n < kCount / 4; ++n) {
    const uint32_t address = mask + swizzled<kKeys>(row, n / 2) + n % 2 * 8 + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // row + 8 has the same swizzle
      const int e = n * 4 + half * 2;
      const uint32_t shown = ptx::ld_shared_u16(address + half * kKeys * 8);
      if ((shown & 0xff) == 0) s[e] = -INFINITY;
      if ((shown & 0xff00) == 0) s[e + 1] = -INFINITY;
    }
  }
}

// The same operations from global memory, on the four scores of a lane in 8 keys that are computed
// a second time. row, key: of the first.
template <class Op>
__device__ __forceinline__ void add_bias_mask_again(float (&s)[4], const ForwardArgs& a,
                                                    const TileInfo& tile, int row, int key) {
  const FlashsciBiasMask& bias_mask = a.p.bias_mask;
  const auto place = [&](const FlashsciScoreStrides& strides) {
    return tile.batch0 * strides.batch0 + tile.batch1 * strides.batch1 + tile.head * strides.head +
           row * strides.row + key;
  };
  const int64_t bias = place(bias_mask.bias_strides), mask = place(bias_mask.mask_strides);
  scale_scores(s, a.scores);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int below = e / 2 * 8;
    if (row + below >= a.p.seq_q) continue;
    if (bias_mask.bias != nullptr) {
      const int64_t at = bias + below * bias_mask.bias_strides.row + e % 2;
      s[e] += bias_mask.bias_is_fp32
                  ? static_cast<const float*>(bias_mask.bias)[at]
                  : Op::to_float(static_cast<const uint16_t*>(bias_mask.bias)[at]);
    }
    if (bias_mask.mask != nullptr &&
        bias_mask.mask[mask + below * bias_mask.mask_strides.row + e % 2] == 0)
      s[e] = -INFINITY;
  }
}

}  // namespace flashsci::sm90::fwd
