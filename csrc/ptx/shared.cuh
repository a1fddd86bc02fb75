// PTX ISA "ld", "st" on the shared window, by 32-bit address.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

// 32-bit shared-window address of a generic pointer to shared memory.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void st_shared(uint32_t shared, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(shared), "r"(value) : "memory");
}

__device__ __forceinline__ void st_shared(uint32_t shared, uint2 value) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};\n" ::"r"(shared), "r"(value.x), "r"(value.y)
               : "memory");
}

__device__ __forceinline__ void st_shared(uint32_t shared, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void st_shared_b16(uint32_t shared, uint16_t value) {
  asm volatile("st.shared.b16 [%0], %1;\n" ::"r"(shared), "h"(value) : "memory");
}

__device__ __forceinline__ void st_shared_b8(uint32_t shared, uint32_t value) {
  asm volatile("st.shared.b8 [%0], %1;\n" ::"r"(shared), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t ld_shared(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(value) : "r"(shared) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t ld_shared_u64(uint32_t shared) {
  uint64_t value;
  asm volatile("ld.shared.u64 %0, [%1];\n" : "=l"(value) : "r"(shared) : "memory");
  return value;
}

__device__ __forceinline__ uint4 ld_shared_v4(uint32_t shared) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(shared)
               : "memory");
  return value;
}

__device__ __forceinline__ float2 ld_shared_f2(uint32_t shared) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
               : "=f"(value.x), "=f"(value.y)
               : "r"(shared)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t ld_shared_u16(uint32_t shared) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(value) : "r"(shared) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t ld_shared_u8(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];\n" : "=r"(value) : "r"(shared) : "memory");
  return value;
}

}  // namespace flashsci::ptx
