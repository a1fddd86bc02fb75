// PTX ISA "Data Movement and Conversion: Non-bulk copy" (sm_80 and newer).
#pragma once
#include <cstdint>

namespace flashsci::ptx {

// 32-bit shared-window address of a generic pointer to shared memory.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// cp.async.cg: 16 bytes, past L1; zeros, and nothing is read, unless valid. (A source size that is
// neither 0 nor 16 costs a dozen instructions.)
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// cp.async.ca: 4 or 8 bytes for rows that are not aligned to 16.
template <int kBytes>
__device__ __forceinline__ void cp_async_small(uint32_t shared, const void* global,
                                               int valid_bytes) {
  static_assert(kBytes == 4 || kBytes == 8, "cp.async.ca copies 4, 8 or 16 bytes");
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(shared), "l"(global),
               "n"(kBytes), "r"(valid_bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Wait until at most kPending of this thread's newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  static_assert(kPending >= 0 && kPending < 8, "few groups are ever in flight");
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace flashsci::ptx
