// PTX ISA "mbarrier" (sm_90; init, arrive, poll and cp_async_arrive already on sm_80). Parity: on a
// fresh barrier wait(0) blocks and wait(1) returns at once; after phase n completes, wait(n & 1)
// succeeds until phase n + 1 completes.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the copy engine; a __syncthreads must follow.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// The same, once `x` has been loaded. A load from shared memory may still be in flight when its
// thread arrives: a fence.proxy.async before both delays the load alone, and whoever waits for the
// arrival may overwrite what it reads.
__device__ __forceinline__ void mbarrier_arrive_after(uint32_t barrier, uint32_t x) {
  // Blocks have one dimension, which the compiler does not know: threadIdx.y is 0.
  mbarrier_arrive(barrier + (x & threadIdx.y));
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(count)
               : "memory");
}

// One arrival, plus `bytes` that the copy engine must deliver before the phase completes.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// One of the arrivals that the barrier counts, made when all earlier cp.async of this thread are
// complete.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// The same, asleep until the phase completes (or a millisecond has passed): a waiting warp costs no
// issue slots.
__device__ __forceinline__ void mbarrier_sleep(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, 1000000;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// The wait of sm_80: it polls, with pauses of the given number of nanoseconds, which leave issue
// slots to others.
__device__ __forceinline__ void mbarrier_poll(uint32_t barrier, uint32_t parity,
                                              uint32_t pause = 0) {
  while (!mbarrier_test_wait(barrier, parity)) {
    if (pause != 0) __nanosleep(pause);
  }
}

}  // namespace flashsci::ptx
