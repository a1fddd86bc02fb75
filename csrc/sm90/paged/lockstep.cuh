// Keeps CTAs in step. The heads of a row of a cache are neighbours in DRAM, and CTAs that have a
// head each read the same rows. But SMs are served at speeds that differ by a fifth, so in a long
// run CTAs drift apart, and an open DRAM page serves one of them where it could serve all. So all
// CTAs count the steps that they begin, and a CTA that is a step ahead of their mean waits.
//
// This affects time only, no result. A CTA may not begin before others have ended, and another
// launch may count at the same time: so a wait is short, and a CTA that has waited in vain does not
// wait again.
#pragma once
#include <cstdint>

#include "config.cuh"

namespace flashsci::sm90::paged {

inline constexpr uint32_t kStep = 4;       // blocks
inline constexpr uint32_t kSteps = 16;     // in a run that is long enough to drift
inline constexpr uint32_t kPatience = 64;  // polls of the counter

// Counted by the CTAs of all launches. CTAs that end add their share of kAll minus the steps they
// have counted: the next launch begins at a multiple of kAll, and no launch has to clear the
// counter.
static __device__ uint32_t steps_begun;
inline constexpr uint32_t kAll = 1 << 24;

// For the warp that loads keys.
struct Lockstep {
  const uint32_t ctas;
  const bool counts;  // all CTAs of a launch count, or none
  bool waits;

  __device__ __forceinline__ explicit Lockstep(const Runs& runs)
      : ctas(runs.ctas),
        counts(runs.total >= runs.ctas * static_cast<int>(kSteps * kStep)),
        waits(true) {}

  // Called before the run's block `count`.
  __device__ __forceinline__ void keep(uint32_t count) {
    if (!counts || count % kStep != 0) return;
    if (threadIdx.x % 32 == 0) {
      atomicAdd(&steps_begun, 1u);
      uint32_t looks = 0;
      while (waits && begun() < count / kStep * ctas) waits = ++looks < kPatience;
    }
    __syncwarp();
  }
  // Called after the last block: the other CTAs no longer wait for this one.
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
