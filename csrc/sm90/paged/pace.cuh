// Keeping step. The heads of a row of a cache lie side by side in DRAM, and CTAs that have a head each
// read the same rows; but SMs are served at speeds that differ by a fifth, so that in a long run CTAs
// drift apart, and what DRAM has open serves one of them where it could serve all. So all count the
// steps that they begin, and who is a step ahead of their mean waits.
//
// No result depends on it, only time. A CTA may not begin before others have ended, and another launch
// may count at the same time: so a wait is short, and who has waited in vain does not wait again.
#pragma once
#include <cstdint>

#include "config.cuh"

namespace flashsci::sm90::paged {

inline constexpr uint32_t kStep = 4;       // blocks
inline constexpr uint32_t kSteps = 16;     // of a run that is long enough to drift
inline constexpr uint32_t kPatience = 64;  // looks at the others

// By the CTAs of all launches. Those that end add what their launch has not counted of kAll: the next
// begins at a multiple of it, and nobody has to clear it.
static __device__ uint32_t steps_begun;
inline constexpr uint32_t kAll = 1 << 24;

// Of the warp that loads keys.
struct Pace {
  const uint32_t ctas;
  const bool counts;  // as all CTAs of a launch, or none
  bool waits;

  __device__ __forceinline__ explicit Pace(const Runs& runs)
      : ctas(runs.ctas),
        counts(runs.total >= runs.ctas * static_cast<int>(kSteps * kStep)),
        waits(true) {}

  // Before the run's block `count`.
  __device__ __forceinline__ void keep(uint32_t count) {
    if (!counts || count % kStep != 0) return;
    if (threadIdx.x % 32 == 0) {
      atomicAdd(&steps_begun, 1u);
      uint32_t looks = 0;
      while (waits && begun() < count / kStep * ctas) waits = ++looks < kPatience;
    }
    __syncwarp();
  }
  // After its last: what the others need not wait for.
  __device__ __forceinline__ void end(uint32_t blocks) const {
    const uint32_t own = kAll / ctas + (blockIdx.x == 0 ? kAll % ctas : 0);
    if (counts && threadIdx.x % 32 == 0)
      atomicAdd(&steps_begun, own - (blocks + kStep - 1) / kStep);
  }

 private:
  static __device__ __forceinline__ uint32_t begun() {
    return *static_cast<volatile uint32_t*>(&steps_begun) % kAll;
  }
};

}  // namespace flashsci::sm90::paged
