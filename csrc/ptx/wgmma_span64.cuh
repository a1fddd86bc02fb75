// PTX ISA "wgmma" (sm_90a): matrix descriptors of tiles whose rows are 64 bytes.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

// Descriptor of an operand in 64-byte swizzle: boxes of 32 16-bit columns as TMA writes them, 512
// bytes aligned. K-major: 32 bytes on is the next k16 step. MN-major (32 columns): 1024 bytes on.
__device__ __forceinline__ uint64_t wgmma_descriptor_span64(uint32_t shared) {
  constexpr uint64_t kGroupBytes = 512;  // from 8 rows to the next
  return static_cast<uint64_t>((shared & 0x3ffff) >> 4) | uint64_t{1} << 16 |
         (kGroupBytes >> 4) << 32 | uint64_t{2} << 62;
}

}  // namespace flashsci::ptx
