// PTX ISA "mbarrier" as sm_80 has it: phases are asked for, and copies of a thread arrive
// (cp.async.mbarrier.arrive). What else there is, and what parities mean: mbarrier.cuh.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

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

__device__ __forceinline__ void mbarrier_poll(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_test_wait(barrier, parity)) {
  }
}

// The same with pauses of so many nanoseconds, which leave issue slots to others.
__device__ __forceinline__ void mbarrier_poll(uint32_t barrier, uint32_t parity, uint32_t pause) {
  while (!mbarrier_test_wait(barrier, parity)) __nanosleep(pause);
}

// One arrival, of those that the barrier counts, when all cp.async of this thread before are done.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}

}  // namespace flashsci::ptx
