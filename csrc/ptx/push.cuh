// PTX ISA "st.async" and the halves of "barrier.cluster" (sm_90): a CTA writes to the shared memory
// of another one, whose mbarrier counts the bytes.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

// All threads of all CTAs of the cluster arrive, then wait; writes before the arrival are visible
// after the wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// mapped, barrier: addresses in one CTA, by map_shared (cluster.cuh).
__device__ __forceinline__ void push(uint32_t mapped, const float (&x)[4], uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];\n" ::"r"(mapped),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
      : "memory");
}

}  // namespace flashsci::ptx
