// PTX ISA "cp.async.bulk", "cp.reduce.async.bulk" (sm_90): one thread moves contiguous bytes.
// Addresses and sizes are multiples of 16. Groups and their waits serve tma.cuh too.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

// Into shared memory; the bytes are reported to an mbarrier.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// Out of shared memory; overwrites the destination.
__device__ __forceinline__ void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}

// global[i] += shared[i], fp32, each element atomically.
__device__ __forceinline__ void bulk_add_f32(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(global),
      "r"(shared), "r"(bytes)
      : "memory");
}

// Into the shared memory of another CTA of the cluster, whose mbarrier hears of the bytes: `mapped` and
// `barrier` are addresses there, by map_shared.
__device__ __forceinline__ void bulk_send(uint32_t mapped, uint32_t shared, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];\n" ::"r"(mapped),
      "r"(shared), "r"(bytes), "r"(barrier)
      : "memory");
}

// Stores of this thread since the last one become a group.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// Waits until at most kPending of this thread's newest groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

// Waits until at most kPending of this thread's newest groups are not yet visible to everybody.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace flashsci::ptx
