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

// Where the pieces of a row are.
struct Pieces {
  bool any;         // else zeros are to be written
  int first, last;  // CTAs
  int row;          // of a tile
};

inline constexpr int kPlannedByWarp = 96;  // slots

// By a whole warp. What it takes from a short plan it sums up itself, while the kernel before runs; afterwards that one has ended.
template <class C>
__device__ __forceinline__ Pieces find_pieces(const Args& a, int token, int head) {
  const FlashsciPagedParams& p = a.p;
  const int n = sequence_of(p, token);
  const int first_q = segment_begin(p.cu_seqlens_q, n + 1, p.sequences, p.tokens);
  const int pair = n < 0 ? 0 : (token - first_q) * a.group + head % a.group;
  const int index = n < 0 ? 0 : first_q * a.group / kRows + n + 1 + pair / kRows;
  Slot slot = {-1};
  int before = 0, all = 0;
  if (a.plan.count <= kPlannedByWarp) {
    if (index < a.plan.count) slot = find_slot<C::kBlockK>(p, a.group, index);
    for (int i = threadIdx.x % 32; i < a.plan.count; i += 32) {
      const int units = units_of(find_slot<C::kBlockK>(p, a.group, i));
      before += i < index ? units : 0;
      all += units;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      before += __shfl_xor_sync(0xffffffffu, before, step);
      all += __shfl_xor_sync(0xffffffffu, all, step);
    }
  }
  ptx::wait_for_prerequisites();
  if (a.plan.count > kPlannedByWarp) {
    if (index < a.plan.count) slot = a.plan.slots[index], before = a.plan.first[index];
    all = a.plan.first[a.plan.count];
  }
  if (n < 0 || slot.sequence != n || slot.first_row != pair / kRows * kRows)
    return {false, 0, 0, 0};
  const Runs runs(all, p.heads_k, a.plan.ctas);
  const int begin = before + 1 + head / a.group * all;
  return {true, runs.cta_of(begin), runs.cta_of(begin + slot.blocks - 1), pair % kRows};
}

// One warp for each (token, head).
template <class Op, class C>
__global__ void __launch_bounds__(128, 8) combine_kernel(const __grid_constant__ Args a) {
  const FlashsciPagedParams& p = a.p;
  const int64_t number = int64_t{blockIdx.x} * 4 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int token = static_cast<int>(number / p.heads_q);
  const int head = static_cast<int>(number - int64_t{token} * p.heads_q);
  if (token >= p.tokens) return;
  constexpr int kPairs = C::kHeadDim / 64;  // of columns, of a lane
  float2 sum[kPairs] = {};
  float lse = -INFINITY, factor = 0.f;
  const Pieces pieces = find_pieces<C>(a, token, head);
  if (pieces.any) {
    const int first = pieces.first, last = pieces.last;
    if (first == last) return;  // whole: written
    const auto place_of = [&](int cta) { return piece_of(cta, cta == first) * kRows + pieces.row; };
    const auto part_of = [&](int cta, int pair) {
      return *reinterpret_cast<const float2*>(a.plan.partial_out + place_of(cta) * C::kHeadDim +
                                              pair * 64 + lane * 2);
    };
    // Each lane has the lse of one of 32 pieces, and pieces come some at a time: a loop would wait
    // for memory at each.
    const auto lse_of = [&](int cta) {
      return cta <= last ? a.plan.partial_lse[place_of(cta)] : -INFINITY;
    };
    constexpr int kTogether = 16 / kPairs;
    float2 parts[kTogether][kPairs];
    const auto load = [&](int base) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair)
          parts[i][pair] =
              first + base + i <= last ? part_of(first + base + i, pair) : make_float2(0.f, 0.f);
    };
    load(0);
    const float own = lse_of(first + lane);
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
    factor = weights == 0.f ? 0.f : 1.f / weights;
    lse = weights == 0.f ? -INFINITY : reference + ptx::lg2_approx(weights);
    if (p.sink != nullptr) {
      const float2 both = with_logit(lse, __ldg(p.sink + head) * kLog2e);
      lse = both.x, factor *= both.y;
    }
  }
  auto* out = static_cast<uint16_t*>(p.out) + token * p.out_row + head * p.out_head;
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    if (i * 64 + lane * 2 < p.head_dim_v)
      *reinterpret_cast<uint32_t*>(out + i * 64 + lane * 2) =
          Op::pack2(sum[i].x * factor, sum[i].y * factor);
  if (lane == 0 && p.lse != nullptr) p.lse[int64_t{head} * p.tokens + token] = lse * kLn2;
}

}  // namespace flashsci::sm90::paged
