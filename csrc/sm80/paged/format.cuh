// 8-bit floats become fp16 without a conversion instruction, which begins with sm_89: their bits
// are moved, and the scales of the call take the difference of the exponents' offsets. This is
// exact, also for subnormal numbers, and NaN stays NaN.
#pragma once
#include <cstdint>

#include "../../core/paged/format.cuh"

namespace flashsci::sm80::paged {

using flashsci::paged::Narrow, flashsci::paged::Same;

// The four bytes of a word, the lowest in the low half of x, divided by 2^8.
__device__ __forceinline__ uint2 f16x4_of_e4m3(uint32_t word) {
  // Only NaN has all ones after the sign. Adding 1 carries into the sign's place, which becomes the
  // first bit of the fp16 exponent; that bit is 0 in every number.
  const uint32_t next = (word & 0x7f7f7f7fu) + 0x01010101u;
  const uint32_t sizes = (next & 0x80808080u) | (word & 0x7f7f7f7fu);
  const auto pair = [&](uint32_t bytes) {
    return __byte_perm(sizes, 0, bytes) >> 1 | (__byte_perm(word, 0, bytes) & 0x80008000u);
  };
  return make_uint2(pair(0x1404), pair(0x3424));
}

// Gathers the upper bytes of fp16.
__device__ __forceinline__ uint2 f16x4_of_e5m2(uint32_t word) {
  return make_uint2(__byte_perm(word, 0, 0x1404), __byte_perm(word, 0, 0x3424));
}

struct E4m3 : Narrow<f16x4_of_e4m3, 256> {};
struct E5m2 : Narrow<f16x4_of_e5m2> {};

}  // namespace flashsci::sm80::paged
