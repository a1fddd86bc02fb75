// PTX ISA "ld" of a byte of the shared window, by 32-bit address.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ uint32_t ld_shared_u8(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];\n" : "=r"(value) : "r"(shared) : "memory");
  return value;
}

}  // namespace flashsci::ptx
