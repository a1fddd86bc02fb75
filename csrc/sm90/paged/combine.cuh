// Paged attention, last kernel: pieces become rows of the output, and rows of no sequence zeros.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../core/softmax.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"
#include "mainloop.cuh"

namespace flashsci::sm90::paged {

// The sequence of a token, or -1. Offsets grow; where they do not, any.
__device__ __forceinline__ int sequence_of(const FlashsciPagedParams& p, int token) {
  const int low = last_before(p.sequences + 2, [&](int i) {  // segments, as in core/varlen.cuh
    return segment_begin(p.cu_seqlens_q, i, p.sequences, p.tokens) <= token;
  });
  return low >= 1 && low <= p.sequences ? low - 1 : -1;
}

// One warp for each (token, head).
template <class Op, int kHeadDim>
__global__ void __launch_bounds__(128, 8) combine_kernel(const __grid_constant__ Args a) {
  ptx::wait_for_prerequisites();
  const FlashsciPagedParams& p = a.p;
  const int64_t number = int64_t{blockIdx.x} * 4 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int token = static_cast<int>(number / p.heads_q);
  const int head = static_cast<int>(number - int64_t{token} * p.heads_q);
  if (token >= p.tokens) return;
  constexpr int kPairs = kHeadDim / 64;  // of columns, of a lane
  float2 sum[kPairs] = {};
  float lse = -INFINITY, factor = 0.f;
  const int n = sequence_of(p, token);
  const int first_q = segment_begin(p.cu_seqlens_q, n + 1, p.sequences, p.tokens);
  const int pair = n < 0 ? 0 : (token - first_q) * a.group + head % a.group;
  const int index = n < 0 ? 0 : first_q * a.group / kRows + n + 1 + pair / kRows;
  const Slot slot = index < a.plan.count ? a.plan.slots[index] : Slot{-1};
  if (n >= 0 && slot.sequence == n && slot.first_row == pair / kRows * kRows) {
    const Runs runs(a.plan, p.heads_k);
    const int begin = a.plan.first[index] + head / a.group * runs.blocks;
    const int first = runs.cta_of(begin), last = runs.cta_of(begin + slot.blocks - 1);
    if (first == last) return;  // whole: written
    const auto place_of = [&](int cta) {
      return piece_of(cta, cta == first) * kRows + pair % kRows;
    };
    // 32 pieces at a time, each lane with the lse of one: a loop would wait for memory at each.
    const auto lse_of = [&](int cta) {
      return cta <= last ? a.plan.partial_lse[place_of(cta)] : -INFINITY;
    };
    const float own = lse_of(first + lane);
    float maximum = own;
    for (int cta = first + 32 + lane; cta <= last; cta += 32) maximum = fmaxf(maximum, lse_of(cta));
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, step));
    const float reference = maximum == -INFINITY ? 0.f : maximum;
    float weights = 0.f;
    for (int base = first; base <= last; base += 32) {
      const float share = ptx::ex2_approx((base == first ? own : lse_of(base + lane)) - reference);
      const int count = min(last - base + 1, 32);
#pragma unroll kHeadDim == 256 ? 4 : 8
      for (int i = 0; i < count; ++i) {
        const float weight = __shfl_sync(0xffffffffu, share, i);
        const float* part = a.plan.partial_out + place_of(base + i) * kHeadDim + lane * 2;
        weights += weight;
#pragma unroll
        for (int column = 0; column < kPairs; ++column) {
          const float2 x = *reinterpret_cast<const float2*>(part + column * 64);
          sum[column].x = fmaf(weight, x.x, sum[column].x);
          sum[column].y = fmaf(weight, x.y, sum[column].y);
        }
      }
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
