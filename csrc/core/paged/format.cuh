// The number formats of caches, and the operands that products take from them.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../dtype_f16.cuh"

namespace flashsci::paged {

__device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// 8-bit floats are widened to fp16, which is exact: the number is kUnit times the fp16 number.
// keys: the operand of product i, from a lane's 16 bytes of a row of K. values: operands from words
// of two rows of V, two columns at a time.
template <uint2 (*kWiden)(uint32_t), int kUnit_ = 1>
struct Narrow {
  static constexpr int kBytes = 1;
  static constexpr float kUnit = kUnit_;
  static __device__ __forceinline__ uint2 keys(const uint4& words, int i) {
    return kWiden(word_of(words, i));
  }
  static __device__ __forceinline__ uint2 values(uint32_t upper, uint32_t lower, int pair) {
    return kWiden(__byte_perm(upper, lower, pair ? 0x7362 : 0x5140));
  }
};
// The dtype of the queries.
struct Same {
  static constexpr int kBytes = 2;
  static constexpr float kUnit = 1.f;
  static __device__ __forceinline__ uint2 keys(const uint4& words, int i) {
    return i == 0 ? make_uint2(words.x, words.y) : make_uint2(words.z, words.w);
  }
  static __device__ __forceinline__ uint2 values(uint32_t upper, uint32_t lower, int) {
    return make_uint2(__byte_perm(upper, lower, 0x5410), __byte_perm(upper, lower, 0x7632));
  }
};

// The dtype of products.
template <class Op, class Format>
using Multiplied = std::conditional_t<Format::kBytes == 1, Float16, Op>;

}  // namespace flashsci::paged
