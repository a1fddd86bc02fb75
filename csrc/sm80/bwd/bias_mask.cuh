// Bias and mask of transposed scores, and the gradient of a bias that has an element for every
// pair.
//
// A warp's keys are assigned to its rows so that a lane has 2 kM neighbours: row m * 16 + half * 8
// + g of a block of 16 kM is key g * 2 kM + 2 m + half. Contiguous memory, a row of keys of one
// query, is then loaded and stored 8 to 16 bytes a lane, and whole sectors a quad. A bias that is
// ALiBi is made here from the slope of its head.
#pragma once
#include "../../core/alibi.cuh"
#include "../../core/ragged_bias.cuh"
#include "../../core/row_statistics.cuh"
#include "config.cuh"
#include "warp_mma.cuh"

namespace flashsci::sm80::bwd {

// The row of a key in a tile in shared memory, in blocks of 16 kM.
template <int kM>
__device__ __forceinline__ int row_of_key(int key) {
  const int in_block = key % (16 * kM);
  return key - in_block + in_block / 2 % kM * 16 + in_block % 2 * 8 + in_block / (2 * kM);
}

// Scores of keys and queries that the window hides become -inf. key: this lane's first; query: that
// of its first column.
template <int kM, int kN>
__device__ __forceinline__ void mask_transposed(float (&s)[kM][kN][4], const Window& window,
                                                int key, int query) {
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const int j = key + i;
    const int begin = j < window.seq_k ? window.first_query(j) - query : 1 << 30;
    const int last = j - window.before - query;  // <= 2^31 - 1
#pragma unroll
    for (int c = 0; c < 2 * kN; ++c) {
      const int at = c / 2 * 8 + c % 2;
      if (at < begin || at > last) s[i / 2][c / 2][i % 2 * 2 + c % 2] = -INFINITY;
    }
  }
}

// Calls each(c, row, exists) for the 2 kN queries of a lane, query + c / 2 * 8 + c % 2, with a
// pointer to the row of each: one address at a time.
template <int kN, class T, class Each>
__device__ __forceinline__ void for_queries(T* start, int64_t row_stride, int query, int queries,
                                            Each&& each) {
  T* row = start + query * row_stride;
#pragma unroll
  for (int c = 0; c < 2 * kN; ++c) {
    each(c, row, query + c / 2 * 8 + c % 2 < queries);
    row += c % 2 == 0 ? row_stride : 7 * row_stride;
  }
}

// Whether the probability of element (m, n, e) stays. kept: the bits of draw_neighbours.
__device__ __forceinline__ bool stays(uint32_t kept, int m, int n, int e) {
  return kept >> (e % 2 * 16 + m * 8 + n * 2 + e / 2) & 1;
}

// dP^T - delta / scale of what is dropped becomes -delta / scale. statistics: of this lane's first
// query, (-lse, -delta / scale).
template <int kM, int kN>
__device__ __forceinline__ void drop_gradients(float (&dp)[kM][kN][4], uint32_t kept,
                                               uint32_t statistics) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float4 x = load_statistics(statistics + n * 64);
#pragma unroll
    for (int i = 0; i < kM * 4; ++i)
      if (!stays(kept, i / 4, n, i % 4)) dp[i / 4][n][i % 4] = i % 2 == 0 ? x.y : x.w;
  }
}

// dP^T - delta / scale becomes dS^T, P^T what dropout leaves of it, times `scale`.
template <int kM, int kN>
__device__ __forceinline__ void drop_probabilities(float (&p)[kM][kN][4], float (&dp)[kM][kN][4],
                                                   uint32_t kept, float scale) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) {
    const int m = i / (4 * kN), n = i / 4 % kN, e = i % 4;
    const float scaled = p[m][n][e] * scale;
    dp[m][n][e] *= scaled;
    p[m][n][e] = stays(kept, m, n, e) ? scaled : 0.f;
  }
}

// s -= slope |i + shift - j| in this order of keys. slope: in the units of s; ahead: i + shift - j of
// this lane's first score.
template <int kM, int kN>
__device__ __forceinline__ void add_alibi_transposed(float (&s)[kM][kN][4], float slope,
                                                     int ahead) {
  const float first = static_cast<float>(ahead);
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) {
    const int m = i / (4 * kN), n = i / 4 % kN, e = i % 4;
    const int further = n * 8 + e % 2 - (m * 2 + e / 2);
    s[m][n][e] = add_alibi(s[m][n][e], slope, first + static_cast<float>(further));
  }
}

// A lane's part of the bias, or a slope, loaded a step before its use, and of a mask that is the same
// for all queries.
template <class Op, int kM, int kN>
struct BiasMaskAhead {
  static constexpr int kKeys = 2 * kM;
  uint32_t bias[2 * kN][kKeys];  // [query, key]: fp32, or 16 bits, or (vectors) 16-bit pairs; or in
                                 // [0, 0] the slope
  uint32_t mask;                 // a byte for each key

  // Bytes [first, first + kBytes) of a row as words; kBytes is 2 to 16.
  template <int kBytes>
  static __device__ __forceinline__ void load_vector(uint32_t* word, const unsigned char* source) {
    if constexpr (kBytes == 16) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(source));
      word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
    } else if constexpr (kBytes == 8) {
      const uint2 x = __ldg(reinterpret_cast<const uint2*>(source));
      word[0] = x.x, word[1] = x.y;
    } else if constexpr (kBytes == 4) {
      word[0] = __ldg(reinterpret_cast<const uint32_t*>(source));
    } else {
      word[0] = __ldg(reinterpret_cast<const uint16_t*>(source));
    }
  }

  // The bytes of a mask for this lane's keys of one query.
  static __device__ __forceinline__ uint32_t load_mask(const uint8_t* row, const BackwardPlan& plan,
                                                       int64_t stride, int key, int keys) {
    uint32_t word = 0;
    if (plan.mask_vector) {
      if (key < keys) load_vector<kKeys>(&word, reinterpret_cast<const unsigned char*>(row + key));
    } else {
#pragma unroll
      for (int j = 0; j < kKeys; ++j)
        if (key + j < keys) word |= static_cast<uint32_t>(__ldg(row + (key + j) * stride)) << 8 * j;
    }
    return word;
  }

  static __device__ __forceinline__ void load_bias(uint32_t (&word)[kKeys],
                                                   const unsigned char* row,
                                                   const FlashsciBiasMask& bias_mask,
                                                   const BackwardPlan& plan, int key, int keys) {
#pragma unroll
    for (int j = 0; j < kKeys; ++j) word[j] = 0;
    if (plan.bias_vector) {
      if (key < keys) {
        if (bias_mask.bias_is_fp32)
          load_vector<4 * kKeys>(word, row + key * 4);
        else
          load_vector<2 * kKeys>(word, row + key * 2);
      }
    } else {
      const int64_t stride = bias_mask.bias_strides.column;
#pragma unroll
      for (int j = 0; j < kKeys; ++j)
        if (key + j < keys)
          word[j] = bias_mask.bias_is_fp32
                        ? __ldg(reinterpret_cast<const uint32_t*>(row) + (key + j) * stride)
                        : __ldg(reinterpret_cast<const uint16_t*>(row) + (key + j) * stride);
    }
  }

  static __device__ __forceinline__ float value(const uint32_t (&word)[kKeys], int j, bool fp32,
                                                bool vector) {
    if (fp32) return __uint_as_float(word[j]);
    if (!vector) return Op::to_float(static_cast<uint16_t>(word[j]));
    return Op::to_float(static_cast<uint16_t>(j % 2 == 0 ? word[j / 2] : word[j / 2] >> 16));
  }

  // Loads from the pairs of one head; query: of the first column. With no queries nothing is
  // loaded, but all is set: a value that may be kept would occupy registers all the time.
  __device__ __forceinline__ void load(const FlashsciBiasMask& bias_mask, const BackwardPlan& plan,
                                       const unsigned char* bias_head, const uint8_t* mask_head,
                                       int query, int key, int queries, int keys) {
    key = opaque(key);  // an address in a register through the loop costs too much
    const int64_t row_bytes =
        row_of_pairs(bias_mask.bias_strides, plan.ragged, keys) * (bias_mask.bias_is_fp32 ? 4 : 2);
    const bool reads_slope = plan.bias_first && has_slopes(bias_mask) && queries > 0;
    if (!plan.bias_first || has_slopes(bias_mask)) queries = 0;
    for_queries<kN>(bias_head, row_bytes, query, queries, [&](int c, auto* row, bool exists) {
      load_bias(bias[c], row, bias_mask, plan, key, exists ? keys : 0);
    });
    if (reads_slope) bias[0][0] = __ldg(reinterpret_cast<const uint32_t*>(bias_head));
    mask = 0;
    if (bias_mask.mask != nullptr && bias_mask.mask_strides.row == 0)
      mask = load_mask(mask_head, plan, bias_mask.mask_strides.column, key, keys);
  }

  // The product of scores starts from the bias, if no other operation comes between. distance: i +
  // shift - j of this lane's first score.
  __device__ __forceinline__ void start(float (&s)[kM][kN][4], const FlashsciBiasMask& bias_mask,
                                        const BackwardPlan& plan, int distance) const {
    const auto set = [&](bool fp32, bool vector) {
#pragma unroll
      for (int i = 0; i < 2 * kN * kKeys; ++i) {
        const int c = i / kKeys, j = i % kKeys;
        s[j / 2][c / 2][j % 2 * 2 + c % 2] = value(bias[c], j, fp32, vector) * plan.bias_factor;
      }
    };
    if (!plan.bias_first) {
      set_zero(s);
    } else if (has_slopes(bias_mask)) {
      set_zero(s);
      add_alibi_transposed(s, __uint_as_float(bias[0][0]) * plan.bias_factor, distance);
    } else if (bias_mask.bias_is_fp32) {
      set(true, false);
    } else if (plan.bias_vector) {
      set(false, true);
    } else {
      set(false, false);
    }
  }

  // A bias that is not loaded ahead: that of a call with a softcap, or with a scale too small to
  // divide by.
  static __device__ __forceinline__ void add_late(float (&s)[kM][kN][4],
                                                  const FlashsciBiasMask& bias_mask,
                                                  const BackwardPlan& plan,
                                                  const unsigned char* bias_head, int query,
                                                  int key, int queries, int keys, int distance) {
    key = opaque(key);  // an address in a register through the loop costs too much
    if (has_slopes(bias_mask)) {
      add_alibi_transposed(s, __ldg(reinterpret_cast<const float*>(bias_head)), distance);
    } else if (bias_mask.bias != nullptr) {
      const int64_t row_bytes = row_of_pairs(bias_mask.bias_strides, plan.ragged, keys) *
                                (bias_mask.bias_is_fp32 ? 4 : 2);
      for_queries<kN>(bias_head, row_bytes, query, queries, [&](int c, auto* row, bool exists) {
        uint32_t word[kKeys];
        load_bias(word, row, bias_mask, plan, key, exists ? keys : 0);
#pragma unroll
        for (int j = 0; j < kKeys; ++j)
          s[j / 2][c / 2][j % 2 * 2 + c % 2] +=
              value(word, j, bias_mask.bias_is_fp32 != 0, plan.bias_vector != 0);
        __syncwarp();  // the compiler would load all columns at once, into occupied registers
      });
    }
  }

  __device__ __forceinline__ void hide(float (&s)[kM][kN][4], const FlashsciBiasMask& bias_mask,
                                       const BackwardPlan& plan, const uint8_t* mask_head,
                                       int query, int key, int queries, int keys) const {
    if (bias_mask.mask == nullptr) return;
    key = opaque(key);  // an address in a register through the loop costs too much
    if (bias_mask.mask_strides.row == 0) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        const bool hidden = (mask >> 8 * j & 0xff) == 0;
#pragma unroll
        for (int c = 0; c < 2 * kN; ++c)
          if (hidden) s[j / 2][c / 2][j % 2 * 2 + c % 2] = -INFINITY;
      }
    } else {
      for_queries<kN>(mask_head, bias_mask.mask_strides.row, query, queries,
                      [&](int c, auto* row, bool exists) {
                        const uint32_t word = load_mask(row, plan, bias_mask.mask_strides.column,
                                                        key, exists ? keys : 0);
#pragma unroll
                        for (int j = 0; j < kKeys; ++j)
                          if ((word >> 8 * j & 0xff) == 0)
                            s[j / 2][c / 2][j % 2 * 2 + c % 2] = -INFINITY;
                        __syncwarp();
                      });
    }
  }
};

// dS^T of one warp to its place in dbias (contiguous keys), from [queries, keys] of its head.
template <class Op, int kM, int kN>
__device__ __forceinline__ void store_bias_gradient(const float (&ds)[kM][kN][4],
                                                    unsigned char* dbias, bool fp32, bool vector,
                                                    int64_t row_stride, int query, int key,
                                                    int queries, int keys) {
  constexpr int kKeys = 2 * kM;
  key = opaque(key);  // an address in a register through the loop costs too much
  const int64_t row_bytes = row_stride * (fp32 ? 4 : 2);
  for_queries<kN>(dbias, row_bytes, query, queries, [&](int c, unsigned char* row, bool exists) {
    if (!exists) return;
    float x[kKeys];
#pragma unroll
    for (int j = 0; j < kKeys; ++j) x[j] = ds[j / 2][c / 2][j % 2 * 2 + c % 2];
    if (fp32) {
      float* target = reinterpret_cast<float*>(row) + key;
      if (vector) {
        if (key < keys) {
          if constexpr (kM == 2)
            *reinterpret_cast<float4*>(target) = make_float4(x[0], x[1], x[2], x[3]);
          else
            *reinterpret_cast<float2*>(target) = make_float2(x[0], x[1]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kKeys; ++j)
          if (key + j < keys) target[j] = x[j];
      }
    } else {
      uint16_t* target = reinterpret_cast<uint16_t*>(row) + key;
      uint32_t word[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) word[m] = Op::pack2(x[2 * m], x[2 * m + 1]);
      if (vector) {
        if (key < keys) {
          if constexpr (kM == 2)
            *reinterpret_cast<uint2*>(target) = make_uint2(word[0], word[1]);
          else
            *reinterpret_cast<uint32_t*>(target) = word[0];
        }
      } else {
#pragma unroll
        for (int j = 0; j < kKeys; ++j)
          if (key + j < keys) target[j] = static_cast<uint16_t>(word[j / 2] >> j % 2 * 16);
      }
    }
  });
}

}  // namespace flashsci::sm80::bwd
