// Paged attention, last kernel: pieces become rows of the output, and rows of no sequence zeros.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../ptx/math.cuh"
#include "../softmax.cuh"
#include "config.cuh"
#include "gather.cuh"
#include "plan.cuh"

namespace flashsci::paged {

// The sequence of a token, or -1. Offsets should grow; where they do not, the result is any
// sequence.
__device__ __forceinline__ int sequence_of(const FlashsciPagedParams& p, int token) {
  const int low = last_before(p.sequences + 2, [&](int i) {  // segments, as in core/varlen.cuh
    return segment_begin(p.cu_seqlens_q, i, p.sequences, p.tokens) <= token;
  });
  return low >= 1 && low <= p.sequences ? low - 1 : -1;
}

// Whether the previous kernel has slots with all rows of a token. If not, the rows are of no
// sequence, or offsets do not grow. Called by a whole warp.
template <class C>
__device__ __forceinline__ bool has_slots(const Args& a, int token) {
  const FlashsciPagedParams& p = a.p;
  const int n = sequence_of(p, token);
  if (n < 0) return false;
  const int first_q = segment_begin(p.cu_seqlens_q, n + 1, p.sequences, p.tokens);
  const int first_slot = first_q * a.group / kRows + n + 1;
  const int last = ((token - first_q + 1) * a.group - 1) / kRows;
  bool found = true;
  for (int tile = (token - first_q) * a.group / kRows + static_cast<int>(threadIdx.x) % 32;
       tile <= last; tile += 32) {
    Slot slot = {-1};
    if (first_slot + tile < a.plan.count)
      slot = find_slot<C::kBlockK>(p, a.group, first_slot + tile);
    found &= slot.sequence == n && slot.first_row == tile * kRows;
  }
  return __all_sync(0xffffffffu, found);
}

// Writes a row of out: a lane has one pair of each 64 columns.
template <class Op, class C>
__device__ __forceinline__ void write_row(const FlashsciPagedParams& p, int token, int head,
                                          const float2 (&x)[C::kHeadDim / 64], float factor,
                                          float lse) {
  const int lane = threadIdx.x % 32;
  auto* out = static_cast<uint16_t*>(p.out) + token * p.out_row + head * p.out_head;
#pragma unroll
  for (int i = 0; i < C::kHeadDim / 64; ++i)
    if (i * 64 + lane * 2 < p.head_dim_v)
      *reinterpret_cast<uint32_t*>(out + i * 64 + lane * 2) =
          Op::pack2(x[i].x * factor, x[i].y * factor);
  if (lane == 0 && p.lse != nullptr) p.lse[int64_t{head} * p.tokens + token] = lse * kLn2;
}

// The weighted sum of the pieces of a row: pieces of CTAs from `first` to `last`. Lane l has the
// lse of CTA first + l in `own`. Called by a whole warp. load(base) brings the pieces from the
// base-th on into `parts`, which holds the first ones at entry. Returns lse, and the factor of the
// sum.
template <int kTogether, int kPairs, class Load, class LseOf>
__device__ __forceinline__ float2 add_pieces(float2 (&sum)[kPairs],
                                             float2 (&parts)[kTogether][kPairs], float own,
                                             int first, int last, const Load& load,
                                             const LseOf& lse_of) {
  const int lane = threadIdx.x % 32;
  if (first + lane > last) own = -INFINITY;
  float maximum = own;
  for (int cta = first + 32 + lane; cta <= last; cta += 32) maximum = fmaxf(maximum, lse_of(cta));
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, step));
  const float reference = maximum == -INFINITY ? 0.f : maximum;
  float weights = 0.f, share = ptx::ex2_approx(own - reference);
#pragma unroll 1
  for (int base = 0;;) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float weight = __shfl_sync(0xffffffffu, share, (base + i) % 32);
      if (first + base + i > last) break;  // of no CTA, or of another tile
      weights += weight;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        sum[pair].x = fmaf(weight, parts[i][pair].x, sum[pair].x);
        sum[pair].y = fmaf(weight, parts[i][pair].y, sum[pair].y);
      }
    }
    base += kTogether;
    if (first + base > last) break;
    load(base);
    if (base % 32 == 0) share = ptx::ex2_approx(lse_of(first + base + lane) - reference);
  }
  const float factor = weights == 0.f ? 0.f : 1.f / weights;
  return make_float2(weights == 0.f ? -INFINITY : reference + ptx::lg2_approx(weights), factor);
}

inline constexpr int kCombiningWarps = 4;  // per CTA

// CTA c of the previous kernel may have left the beginning of a tile: CTA c of this one combines
// its first 16 rows, CTA c + ctas the next 16, and so on. While a CTA waits for the pieces it
// writes the rows of no sequence.
template <class Op, class C>
__global__ void __launch_bounds__(kCombiningWarps * 32, 8)
    combine_kernel(const __grid_constant__ Args a) {
  const FlashsciPagedParams& p = a.p;
  const int first = static_cast<int>(blockIdx.x) % a.plan.ctas;
  const int tier = static_cast<int>(blockIdx.x) / a.plan.ctas;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kPairs = C::kHeadDim / 64;  // pairs of columns per lane
  if (tier == 0) {
#pragma unroll 1
    for (int token = first * kCombiningWarps + warp; token < p.tokens;
         token += a.plan.ctas * kCombiningWarps) {
      if (has_slots<C>(a, token)) continue;
      for (int head = 0; head < p.heads_q; ++head)
        write_row<Op, C>(p, token, head, {}, 0.f, -INFINITY);
    }
  }
  C::Isa::wait_for_prerequisites();
  // The pieces are loaded together with the cut that gives their number, and several at a time: a
  // loop would wait for memory at each piece.
  const Cut cut = a.plan.cuts[first];
#pragma unroll 1
  for (int r = tier * kWarpRows + warp; r < (tier + 1) * kWarpRows; r += kCombiningWarps) {
    const auto place_of = [&](int cta) {
      return piece_of(min(cta, a.plan.ctas - 1), cta == first) * kRows + r;
    };
    constexpr int kTogether = 16 / kPairs;
    float2 parts[kTogether][kPairs];
    const auto load = [&](int base) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair)
          parts[i][pair] = *reinterpret_cast<const float2*>(
              a.plan.partial_out + place_of(first + base + i) * C::kHeadDim + pair * 64 + lane * 2);
    };
    load(0);
    float own = a.plan.partial_lse[place_of(first + lane)];
    if (cut.last < 0 || r >= cut.rows) return;
    const auto lse_of = [&](int cta) {
      return cta <= cut.last ? a.plan.partial_lse[place_of(cta)] : -INFINITY;
    };
    float2 sum[kPairs] = {};
    const float2 whole = add_pieces(sum, parts, own, first, cut.last, load, lse_of);
    float lse = whole.x, factor = whole.y;
    const int pair = cut.first_row + r;
    const int head = cut.head * a.group + pair % a.group;
    if (p.sink != nullptr) {
      const float2 both = with_logit(lse, __ldg(p.sink + head) * kLog2e);
      lse = both.x, factor *= both.y;
    }
    write_row<Op, C>(p, cut.first_q + pair / a.group, head, sum, factor, lse);
  }
}

}  // namespace flashsci::paged
