// fp16 as the kernels see it: 16-bit storage and the instructions that know its format.
#pragma once
#include <cstdint>

#include "../ptx/convert.cuh"
#include "../ptx/mma.cuh"

namespace flashsci {

struct Float16 {
  using Storage = uint16_t;
  static constexpr bool kIsBf16 = false;
  static __device__ __forceinline__ uint32_t pack2(float low, float high) {
    return ptx::cvt_f16x2(low, high);
  }
  static __device__ __forceinline__ float to_float(uint16_t x) { return ptx::cvt_f32_f16(x); }
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    ptx::mma_m16n8k16_f16(c, a, b0, b1);
  }
};

}  // namespace flashsci
