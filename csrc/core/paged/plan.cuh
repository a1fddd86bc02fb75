// Paged attention, the plan: lengths are on the device, and so is the plan. If it is short, every
// CTA of paged_kernel computes it, which is faster than a kernel of its own; all write the same
// values.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

#include "../../ptx/global.cuh"
#include "config.cuh"

namespace flashsci::paged {

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
  if (low < 1 || low > p.sequences) return slot;  // rows of no sequence: combine_kernel writes them
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

// The sum of x over the threads before this one, and over all threads of a CTA. sums: shared
// memory.
template <int kThreads>
__device__ __forceinline__ int2 sum_before(int x, int (&sums)[kThreads / 32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = x;
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
  __syncthreads();
  return make_int2(warps + sum - x, all);
}

template <class Op, class C>  // Op: makes the kernels of different units distinct
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const __grid_constant__ FlashsciPagedParams p, const __grid_constant__ Plan plan,
                int group) {
  __shared__ int sums[kPlanThreads / 32];
  C::Isa::launch_dependents();
  int before = 0;
  for (int base = 0; base < plan.count; base += kPlanThreads) {
    const int index = base + threadIdx.x;
    Slot slot = {-1};
    if (index < plan.count) slot = find_slot<C::kBlockK>(p, group, index);
    const int2 sum = sum_before<kPlanThreads>(units_of(slot), sums);
    if (index < plan.count) plan.slots[index] = slot, plan.first[index] = before + sum.x;
    before += sum.y;
  }
  if (threadIdx.x == 0) plan.first[plan.count] = before;
}

// Shared memory that a CTA needs until it knows where it begins.
struct Planning {
  int sums[kThreads / 32];
  Start start;
};

// Computes the plan and where this CTA begins; called by all threads of a CTA. The thread that has
// the CTA's first slot publishes it.
template <class C>
__device__ __forceinline__ Start plan_and_begin(const Args& a, Runs& runs, Planning& shared) {
  constexpr int kEach = (kPlannedByEach + kThreads - 1) / kThreads;
  // The data that is needed after the offsets is prefetched together with them: lengths, and the
  // first pages.
  const int each = blockIdx.x * kThreads + threadIdx.x;
  if (threadIdx.x < a.p.sequences) ptx::prefetch_l1(a.p.seqused_k + threadIdx.x);
  if (each < a.p.sequences) ptx::prefetch_l2(a.p.block_table + int64_t{each} * a.p.columns);
  Slot slots[kEach];
  int first[kEach], units = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int index = i * kThreads + threadIdx.x;
    slots[i] = Slot{-1};
    if (index < a.plan.count) slots[i] = find_slot<C::kBlockK>(a.p, a.group, index);
    const int2 sum = sum_before<kThreads>(units_of(slots[i]), shared.sums);
    first[i] = units + sum.x, units += sum.y;
    if (index < a.plan.count) a.plan.slots[index] = slots[i], a.plan.first[index] = first[i];
  }
  if (threadIdx.x == 0) a.plan.first[a.plan.count] = units;
  runs = Runs(units, a.p.heads_k, a.plan.ctas);
  const int within = runs.begin(blockIdx.x) % max(units, 1);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int unit = within - first[i];
    if (unit >= 0 && unit < units_of(slots[i]))
      shared.start = {i * kThreads + static_cast<int>(threadIdx.x), unit, slots[i]};
  }
  __syncthreads();
  const Start start = shared.start;
  __syncthreads();
  return start;
}

// The same from the plan that plan_kernel has made. Called by whole warps.
__device__ __forceinline__ Start begin_of(const Args& a, Runs& runs) {
  const Plan& plan = a.plan;
  runs = Runs(plan.first[plan.count], a.p.heads_k, plan.ctas);
  const int within = runs.begin(blockIdx.x) % max(runs.units, 1);
  // The last slot that begins at or before: the one with units.
  const int index = last_before(plan.count, [&](int i) { return plan.first[i] <= within; });
  return {index, within - plan.first[index], plan.slots[index]};
}

}  // namespace flashsci::paged
