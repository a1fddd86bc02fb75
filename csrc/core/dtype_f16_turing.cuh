// fp16 as the kernels of Turing see it: the interface of dtype_f16.cuh, made of sm_75 instructions.
#pragma once
#include <cstdint>

#include "../ptx/convert.cuh"
#include "../ptx/mma.cuh"

namespace flashsci {

struct Float16Turing {
  using Storage = uint16_t;
  static __device__ __forceinline__ uint32_t pack2(float low, float high) {
    return ptx::cvt_f16(low) | static_cast<uint32_t>(ptx::cvt_f16(high)) << 16;
  }
  static __device__ __forceinline__ float to_float(uint16_t x) { return ptx::cvt_f32_f16(x); }
  // m16n8k16 in two steps: the halves of k are the halves of its operands.
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    ptx::mma_m16n8k8_f16(c, a[0], a[1], b0);
    ptx::mma_m16n8k8_f16(c, a[2], a[3], b1);
  }
};

}  // namespace flashsci
