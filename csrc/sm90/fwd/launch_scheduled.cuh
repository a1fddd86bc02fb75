// The host side of forwards whose CTAs take tiles by a schedule (scheduler.cuh): the order and the
// launch.
#pragma once
#include <cuda_runtime.h>
#include <algorithm>
#include <cstdint>

#include "../../core/launch.cuh"
#include "scheduler.cuh"

namespace flashsci::sm90::fwd {

// Tiles of equal cost: in order. Tiles of different cost: longest first from a counter, or paired.
// Packed: the counter, or a CTA for each slot. bytes: of an element of K and V.
template <class C, bool kVarlen>
cudaError_t plan_schedule(SchedulePlan& plan, const FlashsciForwardParams& p, int processors,
                          int bytes) {
  const bool causal = p.window_right >= 0 && p.window_left < 0;
  const int64_t heads = p.batch0 * p.batch1 * p.heads_q;
  const int64_t tiles = num_tiles(p.seq_q, C::kBlockQ, p.num_seqs, kVarlen);
  if (heads * tiles > INT32_MAX / 2) return cudaErrorNotSupported;
  plan = {};
  plan.items = static_cast<uint32_t>(heads * tiles);
  plan.tiles_per_head = static_cast<uint32_t>(tiles);
  plan.heads = static_cast<uint32_t>(heads);
  plan.descending = causal;
  const bool uneven = kVarlen || (causal && tiles > 1);
  const bool counted = kVarlen || p.seq_k >= C::kCountedKeys;
  if (uneven && counted && heads * tiles > processors)
    plan.counter = static_cast<uint32_t*>(p.workspace);  // or NULL
  plan.order = Order::kAsIs;
  if (!kVarlen && uneven && heads * tiles > processors)
    plan.order = plan.counter != nullptr ? Order::kLongestFirst : Order::kBalanced;
  if (plan.order == Order::kBalanced)
    plan.items = static_cast<uint32_t>((heads + 1) / 2 * tiles * 2);
  const int64_t head_bytes =  // of K and V, per head of Q
      int64_t{p.seq_k} * (p.head_dim + p.head_dim_v) * bytes * p.heads_k / p.heads_q;
  const int64_t groups = heads * head_bytes / (32 << 20) + 1;
  plan.group = static_cast<uint32_t>((heads + groups - 1) / groups);
  return cudaSuccess;
}

// fewest: smallest number of CTAs, for work outside the schedule.
template <auto kKernel, class C, bool kVarlen, class Args>
cudaError_t launch_scheduled(const Args& a, int shared_bytes, int processors, cudaStream_t stream,
                             uint32_t fewest = 0) {
  const SchedulePlan& plan = a.schedule;
  cudaError_t error = allow_shared<kKernel>(shared_bytes, a.p.device);
  if (error == cudaSuccess && plan.counter != nullptr)
    error = clear_memory(plan.counter, sizeof(uint32_t), stream);
  if (error != cudaSuccess) return error;
  // Packed without a counter: the hardware hands out the slots as SMs become free.
  const uint32_t starts = plan.order == Order::kBalanced ? plan.items / 2 : plan.items;
  const uint32_t grid = kVarlen && plan.counter == nullptr
                            ? starts
                            : std::max(fewest, std::min(starts, static_cast<uint32_t>(processors)));
  return start<kKernel>(grid, C::kThreads, shared_bytes, stream, a);
}

}  // namespace flashsci::sm90::fwd
