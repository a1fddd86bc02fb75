// Operands of 16 bits: tiles for ldmatrix, whose swizzles are TMA's; products by one mma of m16n8k16.
#pragma once
#include <cstdint>

#include "../../core/smem_tile.cuh"
#include "../../core/warp_mma.cuh"
#include "config.cuh"

namespace flashsci::sm90::pair {

template <class Op_, int kDim_>
struct Half {
  using Op = Op_;
  using Element = uint16_t;
  using T = Tile<kDim_>;
  static constexpr int kDim = kDim_, kElements = 8;  // in 16 bytes
  static constexpr int kRowBytes = T::kRowBytes;

  // C += A B^T.
  static __device__ __forceinline__ void multiply_transposed(float (&c)[2][4], uint32_t a,
                                                             uint32_t b) {
    const int lane = threadIdx.x % 32;
    uint32_t rows[1][kDim / 16][4];
    load_rows<kDim>(rows, a + row_fragment<kDim>(lane));
    flashsci::multiply_transposed<Op, kDim>(reinterpret_cast<float (&)[1][2][4]>(c), rows,
                                            b + column_fragment<kDim>(lane));
  }
  // C += P B.
  static __device__ __forceinline__ void multiply(float (&c)[kDim / 8][4], const float (&p)[2][4],
                                                  uint32_t b) {
    multiply_accumulators<Op, kDim>(reinterpret_cast<float (&)[1][kDim / 8][4]>(c),
                                    reinterpret_cast<const float (&)[1][2][4]>(p),
                                    b + row_fragment<kDim>(threadIdx.x % 32));
  }
  static __device__ __forceinline__ void load(float (&x)[kElements], const Element* source) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(source));
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < kElements; ++e)
      x[e] = Op::to_float(static_cast<uint16_t>(word[e / 2] >> (e % 2 * 16)));
  }
  static __device__ __forceinline__ void store(Element* target, const float (&x)[kElements]) {
    *reinterpret_cast<uint4*>(target) = make_uint4(Op::pack2(x[0], x[1]), Op::pack2(x[2], x[3]),
                                                   Op::pack2(x[4], x[5]), Op::pack2(x[6], x[7]));
  }
};

}  // namespace flashsci::sm90::pair
