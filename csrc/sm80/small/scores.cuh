// Scores of one head in registers: bias, mask and window, for both directions.
#pragma once
#include <cmath>

#include "../../core/mask.cuh"
#include "../../core/softmax.cuh"
#include "fragments.cuh"

namespace flashsci::sm80::small {

// Calls each(x, query, key) for a lane's scores. kTransposed: their rows are keys.
template <bool kTransposed, int kTiles, int kBlocks, class Each>
__device__ __forceinline__ void visit(float (&s)[kTiles][kBlocks][4], Each&& each) {
#pragma unroll
  for (int i = 0; i < kBlocks * kBlocks * 2; ++i) {
    const int block = i / (kBlocks * 2), n = i / 2 % kBlocks;
    const int row = threadIdx.x % 32 / 4 + block * 8, column = threadIdx.x % 4 * 2 + n * 8 + i % 2;
    each(s[block / 2][n][block % 2 * 2 + i % 2], kTransposed ? column : row,
         kTransposed ? row : column);
  }
}

// Calls act(score, value) with the value of the bias or mask for each score; if it is of keys (no
// stride of queries), the compiler reads it once for all queries.
template <bool kTransposed, class Value, int kTiles, int kBlocks, class Params, class Act>
__device__ __forceinline__ void apply(float (&s)[kTiles][kBlocks][4], const void* data,
                                      const FlashsciScoreStrides& strides, const Params& p,
                                      const Head& place, Act&& act) {
  const Value* head = static_cast<const Value*>(data) + place.offset(strides, place.head);
  const auto visit_by = [&](int64_t row, int64_t column) {
    visit<kTransposed>(s, [&](float& x, int query, int key) {
      act(x, __ldg(head + min(query, p.seq_q - 1) * row + min(key, p.seq_k - 1) * column));
    });
  };
  if (strides.row == 0)
    visit_by(0, strides.column);
  else
    visit_by(strides.row, strides.column);
}

// A key's weight as it counts: 0 if it is subnormal, since 1 / weight would exceed fp32.
__device__ __forceinline__ float counted(float weight) {
  return fabsf(weight) < 0x1p-126f ? 0.f : weight;
}

// Scores, -inf where hidden. In the forward (not kTransposed) they include the logarithms of
// weights. Returns their unit, a positive number. plain: that of HeadPlan.
template <class P, bool kTransposed, int kTiles, int kBlocks, class Params>
__device__ __forceinline__ float finish_scores(float (&s)[kTiles][kBlocks][4], const Params& p,
                                               const Head& place, bool plain) {
  if constexpr (sizeof(typename P::Element) == 2)
    if (plain) return p.scale;
  const FlashsciBiasMask& given = p.bias_mask;
  const auto add = [&](auto value_of) {
    return [&, value_of](float& x, auto value) { x = fmaf(x, p.scale, value_of(value)); };
  };
  if (given.bias == nullptr || (kTransposed && P::kWeighted))
    visit<kTransposed>(s, [&](float& x, int, int) { x *= p.scale; });
  else if (P::kWeighted)
    apply<kTransposed, float>(s, given.bias, given.bias_strides, p, place, add([](float weight) {
                                return logf(counted(weight));  // -inf for weight 0
                              }));
  else if (sizeof(typename P::Element) == 4 || given.bias_is_fp32)
    apply<kTransposed, float>(s, given.bias, given.bias_strides, p, place,
                              add([](float x) { return x; }));
  else
    apply<kTransposed, uint16_t>(s, given.bias, given.bias_strides, p, place,
                                 add([](uint16_t x) { return P::Op::to_float(x); }));
  if (given.mask != nullptr)
    apply<kTransposed, uint8_t>(s, given.mask, given.mask_strides, p, place,
                                [](float& x, uint8_t shown) { x = shown == 0 ? -INFINITY : x; });
  if (p.window_left >= 0 || p.window_right >= 0) {
    const Window window(p.window_left, p.window_right, p.lower_right != 0, p.seq_q, p.seq_k);
    visit<kTransposed>(s, [&](float& x, int query, int key) {
      if (key < window.begin(query) || key >= window.end(query)) x = -INFINITY;
    });
  } else if (p.seq_k < kBlocks * 8) {
    visit<kTransposed>(s, [&](float& x, int, int key) { x = key < p.seq_k ? x : -INFINITY; });
  }
  return 1.f;
}

}  // namespace flashsci::sm80::small
