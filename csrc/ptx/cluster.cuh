// PTX ISA "barrier.cluster", "mapa", "ld.shared::cluster" and "st.async" (sm_90): CTAs that run at
// the same time, and read and write each other's shared memory.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;\n" : "=r"(size));
  return size;
}

// A barrier for all threads of all CTAs of the cluster; writes before it are visible after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// The same for threads that have only read since the last barrier: their writes may become visible
// later.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// All threads of all CTAs of the cluster arrive, then wait; writes before the arrival are visible
// after the wait.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// The same address in the shared memory of another CTA.
__device__ __forceinline__ uint32_t map_shared(uint32_t shared, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(mapped) : "r"(shared), "r"(rank));
  return mapped;
}

// An arrival at an mbarrier of another CTA, by map_shared.
__device__ __forceinline__ void mbarrier_arrive_there(uint32_t mapped) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(mapped) : "memory");
}

__device__ __forceinline__ float4 ld_cluster_f4(uint32_t mapped) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(mapped)
               : "memory");
  return x;
}

__device__ __forceinline__ float2 ld_cluster_f2(uint32_t mapped) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];\n"
               : "=f"(x.x), "=f"(x.y)
               : "r"(mapped)
               : "memory");
  return x;
}

// Writes to the shared memory of another CTA, whose mbarrier counts the bytes. mapped, barrier:
// addresses in that CTA, by map_shared.
__device__ __forceinline__ void push(uint32_t mapped, const float (&x)[4], uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];\n" ::"r"(mapped),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
      : "memory");
}

}  // namespace flashsci::ptx
