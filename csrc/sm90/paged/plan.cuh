// Paged attention, the plan: lengths are on the device, and so is it. A short one is made by every
// CTA that follows it, which is sooner than a kernel of its own: all write the same.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../ptx/warpgroup.cuh"
#include "config.cuh"

namespace flashsci::sm90::paged {

inline constexpr int kPlanThreads = 1024;
inline constexpr int kPlannedByEach = 384;  // slots

// Tiles of rows are found as in core/varlen.cuh, with `group` rows for every query.
template <int kBlockK>
__device__ __forceinline__ Slot find_slot(const FlashsciPagedParams& p, int group, int index) {
  int low = 0, high = p.sequences + 2;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    const int begin = segment_begin(p.cu_seqlens_q, middle, p.sequences, p.tokens) * group;
    (begin / kRows + middle <= index ? low : high) = middle;
  }
  Slot slot = {-1};
  if (low < 1 || low > p.sequences) return slot;  // rows of no sequence: combine_kernel's
  const Sequence sequence(p, low - 1);
  const int tile = index - (sequence.first_q * group / kRows + low);
  const int rows = sequence.seq_q * group;
  if (tile < 0 || tile * int64_t{kRows} >= rows) return slot;
  slot.sequence = low - 1;
  slot.first_row = tile * kRows;
  const Window window = sequence.window(p);
  const int begin = window.begin(slot.first_row / group);
  const int end = window.end((min(slot.first_row + kRows, rows) - 1) / group);
  slot.first_block = begin < end ? begin / kBlockK : 0;
  slot.blocks = begin < end ? (end + kBlockK - 1) / kBlockK - slot.first_block : 1;
  slot.first_q = sequence.first_q, slot.seq_q = sequence.seq_q, slot.seq_k = sequence.seq_k;
  return slot;
}

// By all threads of a CTA, which see it afterwards. sums: [kThreads / 32], shared.
template <int kBlockK, int kThreads>
__device__ __forceinline__ void make_plan(const FlashsciPagedParams& p, const Plan& plan, int group,
                                          int* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (int base = 0; base < plan.count; base += kThreads) {
    const int index = base + threadIdx.x;
    Slot slot = {-1};
    if (index < plan.count) slot = find_slot<kBlockK>(p, group, index);
    const int blocks = slot.blocks;
    int sum = blocks;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int warps = 0, all = 0;
    for (int i = 0; i < kThreads / 32; ++i) {
      warps += i < warp ? sums[i] : 0;
      all += sums[i];
    }
    if (index < plan.count) {
      plan.slots[index] = slot;
      plan.first[index] = before + warps + sum - blocks;
    }
    before += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) plan.first[plan.count] = before;
  __syncthreads();
}

template <class Op, int kBlockK>  // Op: each unit has its own
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const __grid_constant__ FlashsciPagedParams p, const __grid_constant__ Plan plan,
                int group) {
  __shared__ int sums[kPlanThreads / 32];
  ptx::launch_dependents();
  make_plan<kBlockK, kPlanThreads>(p, plan, group, sums);
}

}  // namespace flashsci::sm90::paged
