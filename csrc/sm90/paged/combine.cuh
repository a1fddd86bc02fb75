// Paged attention, last kernel: pieces become rows of the output, and rows of no sequence zeros.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../core/softmax.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"
#include "gather.cuh"
#include "plan.cuh"

namespace flashsci::sm90::paged {

// The sequence of a token, or -1. Offsets grow; where they do not, any.
__device__ __forceinline__ int sequence_of(const FlashsciPagedParams& p, int token) {
  const int low = last_before(p.sequences + 2, [&](int i) {  // segments, as in core/varlen.cuh
    return segment_begin(p.cu_seqlens_q, i, p.sequences, p.tokens) <= token;
  });
  return low >= 1 && low <= p.sequences ? low - 1 : -1;
}

// Whether the kernel before has slots with all rows of a token: else they are of no sequence, or
// offsets do not grow. By a whole warp.
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

// A part of a row of out, which has 64 columns for each pair of a lane's.
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

// Row r of the tile that item `first` has the beginning of, if there is one. By a whole warp.
template <class Op, class C>
__device__ __forceinline__ void combine_row(const Args& a, int first, int r) {
  constexpr int kPairs = C::kHeadDim / 64;  // of columns, of a lane
  constexpr int kTogether = 16 / kPairs;    // pieces: a loop would wait for memory at each
  const int lane = threadIdx.x % 32;
  // Pieces of one tile follow each other: those of the items after the first began before these.
  const int64_t begin = piece_row(a.plan, first, true, r);
  const int most = a.plan.ctas * (r < kFewPieceRows ? kMostItems : 1) - 1;
  const auto place_of = [&](int item) {
    const int after = min(item, most) - first;
    return begin + (after * 2 - (after > 0)) * kFewPieceRows;
  };
  float2 parts[kTogether][kPairs];
  const auto load = [&](int base) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair)
        parts[i][pair] = *reinterpret_cast<const float2*>(
            a.plan.partial_out + place_of(first + base + i) * C::kHeadDim + pair * 64 + lane * 2);
  };
  // The first pieces are on their way together with what says how many there are.
  const Cut cut = a.plan.cuts[first];
  load(0);
  float own = a.plan.partial_lse[place_of(first + lane)];  // each lane: of one of 32 pieces
  if (r >= cut.rows || cut.last < 0) return;
  const auto lse_of = [&](int item) {
    return item <= cut.last ? a.plan.partial_lse[place_of(item)] : -INFINITY;
  };
  if (first + lane > cut.last) own = -INFINITY;
  float maximum = own;
  for (int item = first + 32 + lane; item <= cut.last; item += 32)
    maximum = fmaxf(maximum, lse_of(item));
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, step));
  const float reference = maximum == -INFINITY ? 0.f : maximum;
  float2 sum[kPairs] = {};
  float weights = 0.f, share = ptx::ex2_approx(own - reference);
#pragma unroll 1
  for (int base = 0;;) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float weight = __shfl_sync(0xffffffffu, share, (base + i) % 32);
      if (first + base + i > cut.last) break;  // of another tile, or of none
      weights += weight;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        sum[pair].x = fmaf(weight, parts[i][pair].x, sum[pair].x);
        sum[pair].y = fmaf(weight, parts[i][pair].y, sum[pair].y);
      }
    }
    base += kTogether;
    if (first + base > cut.last) break;
    load(base);
    if (base % 32 == 0) share = ptx::ex2_approx(lse_of(first + base + lane) - reference);
  }
  float factor = weights == 0.f ? 0.f : 1.f / weights;
  float lse = weights == 0.f ? -INFINITY : reference + ptx::lg2_approx(weights);
  const int pair = cut.first_row + r;
  const int head = cut.head * a.group + pair % a.group;
  if (a.p.sink != nullptr) {
    const float2 both = with_logit(lse, __ldg(a.p.sink + head) * kLog2e);
    lse = both.x, factor *= both.y;
  }
  write_row<Op, C>(a.p, cut.first_q + pair / a.group, head, sum, factor, lse);
}

inline constexpr int kCombiningWarps = 4;  // of a CTA

// Item n may have left the beginning of a tile: CTA n puts its first 16 rows together, the n-th after
// as many CTAs as the kernel before had the next 16. Where there are more items rows are few, and each
// CTA has the next item after so many as there are CTAs. While they wait for the pieces, CTAs write
// the rows of no sequence.
template <class Op, class C>
__global__ void __launch_bounds__(kCombiningWarps * 32, 8)
    combine_kernel(const __grid_constant__ Args a) {
  const FlashsciPagedParams& p = a.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kPairs = C::kHeadDim / 64;  // of columns, of a lane
  int item = static_cast<int>(blockIdx.x), tier = 0;
  if (item < a.plan.ctas) {
#pragma unroll 1
    for (int token = item * kCombiningWarps + warp; token < p.tokens;
         token += a.plan.ctas * kCombiningWarps) {
      if (has_slots<C>(a, token)) continue;
      for (int head = 0; head < p.heads_q; ++head)
        write_row<Op, C>(p, token, head, {}, 0.f, -INFINITY);
    }
  }
  ptx::wait_for_prerequisites();
  const int items = a.plan.counter->items;
  if (blockIdx.x == 0 && threadIdx.x == 0) a.plan.counter->ready = 0;
  if (items <= a.plan.ctas) tier = item / a.plan.ctas, item %= a.plan.ctas;
#pragma unroll 1
  for (; item < items; item += gridDim.x) {
    const int rows = items > a.plan.ctas ? kFewPieceRows : kWarpRows;
#pragma unroll 1
    for (int r = warp; r < rows; r += kCombiningWarps)
      combine_row<Op, C>(a, item, tier * kWarpRows + r);
  }
}

}  // namespace flashsci::sm90::paged
