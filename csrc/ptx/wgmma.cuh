// PTX ISA "wgmma" (sm_90a): ordering and matrix descriptors; the products are in wgmma_<dtype>.cuh.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

// Before the first wgmma, and after ordinary writes to its accumulators or A registers.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Wait until at most kPending of the newest groups are in flight. Follow it with wgmma_tie.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Ties accumulators to this point: the wait does not name them, so reads might move above it. It
// emits no instruction.
template <int kCount>
__device__ __forceinline__ void wgmma_tie(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// ptxas moves nothing across a branch, in particular no wgmma_wait above the code before it. x: a
// value >= 0 that the preceding code computes.
__device__ __forceinline__ void schedule_fence(float x) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@!p bra.uni PASSED;\n"
      "nanosleep.u32 1;\nPASSED:\n}\n" ::"f"(x)
      : "memory");
}

// The same; x: a value >= 0 that is the same in all lanes.
__device__ __forceinline__ void schedule_fence(int x) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.lt.s32 p, %0, 0;\n@!p bra.uni PASSED;\n"
      "nanosleep.u32 1;\nPASSED:\n}\n" ::"r"(x)
      : "memory");
}

// Descriptor of an operand in 128-byte swizzle, 1024-byte aligned tiles as TMA writes them: K-major
// tiles have group_bytes (SBO) from 8 rows to the next; MN-major ones also block_bytes (LBO) from
// 64 columns to the next.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared, uint32_t block_bytes,
                                                     uint32_t group_bytes) {
  return static_cast<uint64_t>((shared & 0x3ffff) >> 4) |
         static_cast<uint64_t>((block_bytes >> 4) & 0x3fff) << 16 |
         static_cast<uint64_t>((group_bytes >> 4) & 0x3fff) << 32 | uint64_t{1} << 62;
}

}  // namespace flashsci::ptx
