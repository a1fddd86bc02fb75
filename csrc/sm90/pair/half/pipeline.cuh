// The blocks that a CTA goes through: one thread copies them as stages become free, the other
// warpgroups work on them.
#pragma once
#include "../../../ptx/cluster.cuh"
#include "../../../ptx/mbarrier.cuh"
#include "../../../ptx/shared.cuh"
#include "../../../ptx/tma.cuh"
#include "lane_map.cuh"

namespace flashsci::sm90::pair::half {

__device__ __forceinline__ bool copies() { return threadIdx.x == kThreads; }

// The storage in dynamic shared memory. Its barriers are ready for all CTAs of a cluster after
// cluster_wait(), and for the copying thread at once. part_bytes: size of the data that will be
// pushed into `parts`.
template <class C>
__device__ __forceinline__ Storage<C>& start_storage(unsigned char* memory, int part_bytes) {
  const uint32_t rest = -ptx::shared_address(memory) & 1023;
  auto& shared = *reinterpret_cast<Storage<C>*>(memory + rest);
  poison_block(&shared, sizeof(shared));
  if (copies()) {
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.copied[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.read[i]), kWarps);
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.own_copied), 1);
    ptx::mbarrier_init(ptx::shared_address(&shared.summed), 1);
    ptx::mbarrier_init_fence();
    ptx::mbarrier_arrive_expect(ptx::shared_address(&shared.summed), part_bytes);
  }
  __syncwarp();
  ptx::cluster_arrive();
  return shared;
}

// CTA `rank` of a cluster takes blocks rank, rank + size, ... of this number of rows.
template <class C>
struct Blocks {
  static constexpr uint32_t kStageBytes = sizeof(Stage<C::kDim>);
  const int rows, first = ptx::cluster_rank() * kRows, stride = ptx::cluster_size() * kRows;
  const uint32_t stage, copied, read;

  __device__ __forceinline__ Blocks(Storage<C>& shared, int rows)
      : rows(rows),
        stage(ptx::shared_address(&shared.stage[0])),
        copied(ptx::shared_address(&shared.copied[0])),
        read(ptx::shared_address(&shared.read[0])) {}

  // Calls issue(stage, barrier, row) for the first blocks, one per stage.
  template <class Issue>
  __device__ __forceinline__ void start(Issue&& issue) const {
#pragma unroll
    for (int i = 0; i < C::kStages; ++i)
      if (first + i * stride < rows)
        issue(stage + i * kStageBytes, copied + i * 8, first + i * stride);
  }
  // After each block, leave(stage, row) first, then issue() for the block that takes its place.
  template <class Leave, class Issue>
  __device__ __forceinline__ void refill(Leave&& leave, Issue&& issue) const {
    for_slots([&](int slot, uint32_t parity, int row) {
      ptx::mbarrier_wait(read + slot * 8, parity);
      leave(stage + slot * kStageBytes, row);
      const int next = row + C::kStages * stride;
      if (next < rows) issue(stage + slot * kStageBytes, copied + slot * 8, next);
    });
  }
  // step(stage, row) works on a block.
  template <class Step>
  __device__ __forceinline__ void consume(Step&& step) const {
    for_slots([&](int slot, uint32_t parity, int row) {
      ptx::mbarrier_wait(copied + slot * 8, parity);
      step(stage + slot * kStageBytes, row);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(read + slot * 8);
    });
  }

 private:
  template <class Each>
  __device__ __forceinline__ void for_slots(Each&& each) const {
    int slot = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int row = first; row < rows; row += stride) {
      each(slot, parity, row);
      if (++slot == C::kStages) slot = 0, parity ^= 1;
    }
  }
};

// Loads rows of all heads from `row` on; called by the copying thread; zeros past the last row.
template <int kDim>
__device__ __forceinline__ void copy_rows(uint32_t target, const CUtensorMap& map,
                                          const Place& place, int row, uint32_t barrier) {
#pragma unroll
  for (int i = 0; i < Rows<kDim>::kPanels; ++i)
    ptx::tma_load_5d(target + i * static_cast<int>(sizeof(Rows<kDim>::panel[0])), &map, barrier,
                     place.head * kDim + i * (kPanelBytes / 2), row, 0, place.batch1, place.batch0);
}

// Loads part of a stage, in the same thread: the rows of two tensors from `row` on, and their pairs
// with the CTA's rows from `own` on. `bytes`: the rest of the stage.
template <int kDim>
__device__ __forceinline__ void copy_block(uint32_t stage, uint32_t barrier, const Place& place,
                                           const CUtensorMap& first, const CUtensorMap& second,
                                           const CUtensorMap& bias, int row, int own, int bytes) {
  using S = Stage<kDim>;
  constexpr uint32_t kFirst = offsetof(S, first), kSecond = offsetof(S, second);
  constexpr int kBox = kRows * kBoxPairs * kCellBytes, kBytes = offsetof(S, statistics);
  static_assert(kBytes == kRows * (2 * kHeads * kDim * 2 + kRows * kCellBytes),
                "boxes fill their stage");
  poison_stage(stage, sizeof(S));
  ptx::mbarrier_arrive_expect(barrier, kBytes + bytes);
  copy_rows<kDim>(stage + kFirst, first, place, row, barrier);
#pragma unroll
  for (int i = 0; i < kRows / kBoxPairs; ++i)
    ptx::tma_load_5d(stage + i * kBox, &bias, barrier, place.head, row + i * kBoxPairs, own,
                     place.batch1, place.batch0);
  copy_rows<kDim>(stage + kSecond, second, place, row, barrier);
}

}  // namespace flashsci::sm90::pair::half
