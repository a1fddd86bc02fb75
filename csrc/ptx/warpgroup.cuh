// Housekeeping of sm_90: setmaxnreg, elect, named barriers, dependent launches.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// True in one lane of a converged warp, in a form ptxas knows to be a single lane.
__device__ __forceinline__ bool elect() {
  uint32_t chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(chosen));
  return chosen != 0;
}

// Named barriers 0 .. 15 (0 is __syncthreads); threads = arriving plus waiting threads.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Whether x holds in all threads of the barrier.
__device__ __forceinline__ bool barrier_all(int id, int threads, bool x) {
  int all;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %3, 0;\nbarrier.cta.red.and.pred q, %1, %2, p;\n"
      "selp.b32 %0, 1, 0, q;\n}\n"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<int>(x))
      : "memory");
  return all != 0;
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Programmatic dependent launch: the next kernel in the stream may start once all CTAs have called
// this; it waits for the end of this kernel before it reads anything.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}

__device__ __forceinline__ void wait_for_prerequisites() {
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

}  // namespace flashsci::ptx
