// The blocks that a CTA goes through, one after the other, while later ones are copied.
#pragma once
#include "../../ptx/bulk.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "load.cuh"

namespace flashsci::sm90::pair {

// The storage in dynamic shared memory, with its barriers ready.
template <class C>
__device__ __forceinline__ Storage<C>& start_storage(unsigned char* memory) {
  const uint32_t rest = -ptx::shared_address(memory) & 1023;
  auto& shared = *reinterpret_cast<Storage<C>*>(memory + rest);
  poison_block(&shared, sizeof(shared));
  if (threadIdx.x == 0) {
#pragma unroll
    for (uint64_t& barrier : shared.copied) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    ptx::mbarrier_init(ptx::shared_address(&shared.own_copied), 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  return shared;
}

// CTA `rank` of a cluster takes blocks rank, rank + size, ...: issue(stage, barrier, row) starts
// the copies of one, in one thread; step(stage, row) works on it, when these copies and those of
// the CTA's own data are complete.
template <class C, class Issue, class Step>
__device__ __forceinline__ void for_blocks(Storage<C>& shared, int rows, int rank, int size,
                                           Issue&& issue, Step&& step) {
  constexpr int kAhead = C::kStages > 1 ? C::kStages - 1 : 1;  // blocks in flight
  constexpr uint32_t kStageBytes = sizeof(Stage<C::kDim>);
  const int stride = size * kRows;
  const uint32_t first = ptx::shared_address(&shared.stage[0]);
  const uint32_t barriers = ptx::shared_address(&shared.copied[0]);
  const auto issue_at = [&](int slot, int row) {
    if (threadIdx.x != 0 || row >= rows) return;
    ptx::bulk_wait_read<0>();  // a step's stores from its stage have read it
    poison_stage(first + slot * kStageBytes, kStageBytes);
    issue(first + slot * kStageBytes, barriers + slot * 8, row);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) issue_at(i, rank * kRows + i * stride);
  ptx::mbarrier_wait(ptx::shared_address(&shared.own_copied), 0);
  int slot = 0, next = kAhead % C::kStages;  // the stage in work, and the one copied into
  uint32_t parity = 0;
#pragma unroll 1
  for (int row = rank * kRows; row < rows; row += stride) {
    if (C::kStages > 1) {
      __syncthreads();  // the last one has been read
      issue_at(next, row + kAhead * stride);
    }
    ptx::mbarrier_wait(barriers + slot * 8, parity);
    step(first + slot * kStageBytes, row);
    if (C::kStages == 1) {
      __syncthreads();
      issue_at(0, row + stride);
    }
    if (++slot == C::kStages) slot = 0, parity ^= 1;
    if (++next == C::kStages) next = 0;
  }
  if (threadIdx.x == 0) ptx::bulk_wait_read<0>();
  __syncthreads();  // stages are free
}

}  // namespace flashsci::sm90::pair
