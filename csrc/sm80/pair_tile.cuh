// Bias and mask of one tile of scores, in registers: how they come from memory and what becomes of
// them. Scores are interleaved (common/tile.cuh): the columns 2 t, 2 t + 1 of two n8 blocks are
// keys 4 t .. 4 t + 3, so that a lane reads four neighbours at once and a quad whole sectors.
#pragma once
#include <cmath>
#include <cstdint>

#include "../common/ptx/cp_async.cuh"
#include "../common/ptx/global.cuh"
#include "../common/ptx/shared.cuh"
#include "../common/tile.cuh"
#include "../include/flashsci.h"

namespace flashsci::sm80 {

// What came of the bias: fp32, two 16-bit elements in each of the first two registers of four, or
// one 16-bit element in each.
enum BiasForm { kNoBias = 0, kFloats = 1, kPairsOf16 = 2, kOneOf16 = 3 };

template <class C>
__device__ __forceinline__ void clear_bias(uint32_t (&raw)[C::kM][2][C::kN / 2][4]) {
#pragma unroll
  for (int m = 0; m < C::kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < C::kN / 2; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) raw[m][half][j][e] = 0;
}

// Starts the loads of a bias tile. `vector`: the whole tile is inside the keys, and every four keys
// of every row are an aligned vector. Rows past the last one read the last one's.
template <class C>
__device__ __forceinline__ void load_bias(uint32_t (&raw)[C::kM][2][C::kN / 2][4],
                                          const void* __restrict__ bias,  // [seq_q, seq_k]
                                          const FlashsciPairStrides& strides, bool fp32,
                                          bool vector, int row, int key, int seq_q, int seq_k) {
  // Calls load(registers, index of the first element, of how many keys further it is).
  const auto each = [&](auto&& load) {
#pragma unroll
    for (int m = 0; m < C::kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t start =
            min(row + m * 16 + half * 8, seq_q - 1) * strides.row + key * strides.column;
#pragma unroll
        for (int j = 0; j < C::kN / 2; ++j) load(raw[m][half][j], start, j * 16);
      }
  };
  const auto one_by_one = [&](const auto* source) {
    each([&](uint32_t (&x)[4], int64_t start, int further) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[e] =
            key + further + e < seq_k ? __ldg(source + start + (further + e) * strides.column) : 0;
    });
  };
  const auto* floats = static_cast<const uint32_t*>(bias);
  const auto* halves = static_cast<const uint16_t*>(bias);
  if (fp32 && vector) {
    each([&](uint32_t (&x)[4], int64_t start, int further) {
      ptx::ld_global_nc_v4(x, floats + start + further);
    });
  } else if (vector) {
    each([&](uint32_t (&x)[4], int64_t start, int further) {
      ptx::ld_global_nc_v2(x[0], x[1], halves + start + further);
    });
  } else if (fp32) {
    one_by_one(floats);
  } else {
    one_by_one(halves);
  }
}

// What the scores start from: factor * bias.
template <class Op, class C>
__device__ __forceinline__ void convert_bias(float (&c)[C::kM][C::kN][4],
                                             const uint32_t (&raw)[C::kM][2][C::kN / 2][4],
                                             BiasForm form, float factor) {
  const auto each = [&](auto&& value) {
#pragma unroll
    for (int m = 0; m < C::kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < C::kN / 2; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            c[m][2 * j + e / 2][half * 2 + e % 2] = value(raw[m][half][j], e);
  };
  if (form == kFloats) {
    each([&](const uint32_t (&x)[4], int e) { return factor * __uint_as_float(x[e]); });
  } else if (form == kPairsOf16) {
    each([&](const uint32_t (&x)[4], int e) {
      return factor * Op::to_float(static_cast<uint16_t>(x[e / 2] >> (e % 2 * 16)));
    });
  } else if (form == kOneOf16) {
    each([&](const uint32_t (&x)[4], int e) {
      return factor * Op::to_float(static_cast<uint16_t>(x[e]));
    });
  } else {
    each([](const uint32_t (&)[4], int) { return 0.f; });
  }
}

// Where the mask of pairs hides, the scores start from -inf. `vector` as for load_bias.
template <class C>
__device__ __forceinline__ void hide_pairs(float (&c)[C::kM][C::kN][4],
                                           const uint8_t* __restrict__ mask,  // [seq_q, seq_k]
                                           const FlashsciPairStrides& strides, bool vector, int row,
                                           int key, int seq_q, int seq_k) {
  uint32_t words[C::kM][2][C::kN / 2];  // a byte for each of this lane's four keys
  const auto each = [&](auto&& read) {
#pragma unroll
    for (int m = 0; m < C::kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint8_t* start =
            mask + min(row + m * 16 + half * 8, seq_q - 1) * strides.row + key * strides.column;
#pragma unroll
        for (int j = 0; j < C::kN / 2; ++j) words[m][half][j] = read(start, j * 16);
      }
  };
  if (vector) {
    each([](const uint8_t* start, int further) {
      return __ldg(reinterpret_cast<const uint32_t*>(start + further));
    });
  } else {
    each([&](const uint8_t* start, int further) {
      uint32_t word = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (key + further + e < seq_k)
          word |= uint32_t{__ldg(start + (further + e) * strides.column)} << (8 * e);
      return word;
    });
  }
#pragma unroll
  for (int i = 0; i < C::kM * C::kN * 4; ++i) {
    const int m = i / (C::kN * 4), n = i / 4 % C::kN, half = i / 2 % 2, e = i % 2;
    if ((words[m][half][n / 2] & (0xffu << (n % 2 * 16 + e * 8))) == 0)
      c[m][n][half * 2 + e] = -INFINITY;
  }
}

// Copies the mask of a tile of keys, one byte each, to shared memory; keys past the last one are
// hidden.
template <int kKeys>
__device__ __forceinline__ void load_key_mask(uint32_t target,
                                              const uint8_t* __restrict__ mask,  // [keys]
                                              int64_t stride, bool vector, int keys) {
  const int thread = threadIdx.x;
  if (vector) {
    if (thread < kKeys / 4)
      ptx::cp_async_small<4>(target + thread * 4, mask + thread * 4,
                             min(max(keys - thread * 4, 0), 4));
  } else if (thread < kKeys) {
    ptx::st_shared_byte(target + thread, thread < keys ? mask[thread * stride] : 0);
  }
}

// The bytes of a lane's keys; sets whether the tile shows and hides any key.
template <class C>
__device__ __forceinline__ void read_key_mask(uint32_t (&words)[C::kN / 2], uint32_t source,
                                              bool& any_shown, bool& any_hidden) {
  uint32_t shown = 0, hidden = 0;
#pragma unroll
  for (int j = 0; j < C::kN / 2; ++j) {
    words[j] = ptx::ld_shared(source + threadIdx.x % 4 * 4 + j * 16);
    shown |= words[j];
    hidden |= (words[j] - 0x01010101u) & ~words[j] & 0x80808080u;  // nonzero iff a byte is 0
  }
  any_shown = __any_sync(0xffffffffu, shown != 0);
  any_hidden = __any_sync(0xffffffffu, hidden != 0);
}

template <class C>
__device__ __forceinline__ void hide_keys(float (&s)[C::kM][C::kN][4],
                                          const uint32_t (&words)[C::kN / 2]) {
#pragma unroll
  for (int n = 0; n < C::kN; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if ((words[n / 2] & (0xffu << (n % 2 * 16 + e * 8))) == 0)
#pragma unroll
        for (int m = 0; m < C::kM; ++m) s[m][n][e] = s[m][n][2 + e] = -INFINITY;
}

}  // namespace flashsci::sm80
