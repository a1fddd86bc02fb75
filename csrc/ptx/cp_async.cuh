// PTX ISA "Data Movement and Conversion: Non-bulk copy" (sm_80 and newer). On Turing the same
// through a register: the copy is complete when the call returns, and waits do nothing.
#pragma once
#include <cstdint>

#include "shared.cuh"

namespace flashsci::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr bool kAsync = false;
#else
inline constexpr bool kAsync = true;
#endif

// cp.async.cg: 16 bytes, past L1. Unless valid, writes zeros and reads nothing. (A source size that
// is neither 0 nor 16 costs a dozen instructions.)
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool valid) {
  if constexpr (kAsync) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared),
                 "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
  } else {
    st_shared(shared, valid ? __ldg(static_cast<const uint4*>(global)) : make_uint4(0, 0, 0, 0));
  }
}

// 16 bytes, past L1, where `wanted`; else nothing is read or written. There is no branch, so that
// calls share their common address arithmetic.
__device__ __forceinline__ void cp_async_16_if(bool wanted, uint32_t shared, const void* global) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "@p cp.async.cg.shared.global.L2::128B [%1], [%2], 16;\n"
      "}\n" ::"r"(static_cast<uint32_t>(wanted)),
      "r"(shared), "l"(global)
      : "memory");
}

// cp.async.ca: 4 or 8 bytes for rows that are not aligned to 16.
template <int kBytes>
__device__ __forceinline__ void cp_async_small(uint32_t shared, const void* global,
                                               int valid_bytes) {
  static_assert(kBytes == 4 || kBytes == 8, "cp.async.ca copies 4, 8 or 16 bytes");
  if constexpr (kAsync) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(shared), "l"(global),
                 "n"(kBytes), "r"(valid_bytes)
                 : "memory");
  } else {
#pragma unroll
    for (int word = 0; word < kBytes / 4; ++word) {
      const auto* source = static_cast<const uint16_t*>(global) + 2 * word;
      uint32_t value = 0;
      if (valid_bytes >= 4 * word + 4)
        value = __ldg(reinterpret_cast<const uint32_t*>(source));
      else if (valid_bytes > 4 * word)
        value = __ldg(source);
      st_shared(shared + 4 * word, value);
    }
  }
}

__device__ __forceinline__ void cp_async_commit() {
  if constexpr (kAsync) asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Wait until at most kPending of this thread's newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  static_assert(kPending >= 0 && kPending < 8, "few groups are ever in flight");
  if constexpr (kAsync) asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace flashsci::ptx
