// Dropout: which probabilities stay, by Philox4x32-10 as a function of the seed and the position
// (flashsci.dropout_mask), as bits in the order of a lane's fragments.
//
// One draw serves four neighbouring keys of a query. Bit 4 b + e of the words is element e of block
// b = m * kN + n of the accumulators, 8 blocks a word.
#pragma once
#include <cstdint>

#include "../include/flashsci_dropout.h"
#include "../ptx/reduce.cuh"
#include "smem_tile.cuh"

namespace flashsci {

// The effect of a kernel's last argument on probabilities: dropout, or none without one.
template <class... Drop>
struct Dropping;

template <>
struct Dropping<> {
  static constexpr bool kDrops = false;
  struct Seed {};
  __device__ __forceinline__ Dropping() {}
  __device__ __forceinline__ Seed read_seed() const { return {}; }
};

template <>
struct Dropping<FlashsciDropout> {
  static constexpr bool kDrops = true;
  const int64_t* seed;
  uint32_t threshold;
  float scale;

  __device__ __forceinline__ explicit Dropping(const FlashsciDropout& p)
      : seed(p.seed), threshold(p.threshold), scale(p.keep_scale) {}

  // The seed, in uniform registers. The backward reads it for each word of bits: its main loops
  // have no registers to keep it in.
  struct Seed {
    uint32_t key[2], offset;
  };
  __device__ __forceinline__ Seed read_seed() const {
    const int64_t* from = seed + opaque(0);
    const auto key = static_cast<uint64_t>(__ldg(from));
    return {{static_cast<uint32_t>(ptx::redux_max(static_cast<int>(key))),
             static_cast<uint32_t>(ptx::redux_max(static_cast<int>(key >> 32)))},
            static_cast<uint32_t>(ptx::redux_max(static_cast<int>(__ldg(from + 1))))};
  }

  // Bits 0 .. 3: whether keys 4 quad .. 4 quad + 3 stay. stream: b * heads_q + h.
  __device__ __forceinline__ uint32_t draw(const Seed& of, uint32_t stream, uint32_t row,
                                           uint32_t quad) const {
    uint32_t x[4] = {of.offset, stream, row, quad};
#pragma unroll
    for (uint32_t round = 0; round < 10; ++round) {
      const uint64_t first = uint64_t{0xD2511F53u} * x[0], second = uint64_t{0xCD9E8D57u} * x[2];
      x[0] = static_cast<uint32_t>(second >> 32) ^ x[1] ^ (of.key[0] + round * 0x9E3779B9u);
      x[1] = static_cast<uint32_t>(second);
      x[2] = static_cast<uint32_t>(first >> 32) ^ x[3] ^ (of.key[1] + round * 0xBB67AE85u);
      x[3] = static_cast<uint32_t>(first);
    }
    uint32_t kept = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) kept |= x[i] >= threshold ? 1u << i : 0u;
    return kept;
  }

  // Blocks 8 word .. 8 word + 7, rows are queries. row: this lane's first; key: that of the warp's
  // first score, a multiple of 8.
  template <int kM, int kN>
  __device__ __forceinline__ uint32_t draw_rows(const Seed& of, int word, uint32_t stream, int row,
                                                int key) const {
    const int lane = threadIdx.x % 32, odd = lane % 2;
    uint32_t own = 0;  // two lanes share their quads: each draws one of the two rows
#pragma unroll 2
    for (int b = 0; b < (kM * kN < 8 ? kM * kN : 8); ++b) {
      const int m = (8 * word + b) / kN, n = (8 * word + b) % kN;
      own |= draw(of, stream, row + m * 16 + odd * 8, key / 4 + n * 2 + lane % 4 / 2) << 4 * b;
    }
    const uint32_t other = __shfl_xor_sync(0xffffffffu, own, 1);
    const uint32_t upper = (odd ? other : own) >> 2 * odd, lower = (odd ? own : other) >> 2 * odd;
    return (upper & 0x33333333u) | (lower & 0x33333333u) << 2;
  }
  // The same with interleaved keys (smem_tile.cuh); key: that of this lane's first score.
  template <int kM, int kN>
  __device__ __forceinline__ uint32_t draw_interleaved_rows(const Seed& of, uint32_t stream,
                                                            int row, int key) const {
    static_assert(kM <= 2 && kN == 4, "one word");
    uint32_t kept = 0;
#pragma unroll 2
    for (int i = 0; i < 4 * kM; ++i) {
      const int pair = i % 2, half = i / 2 % 2, m = i / 4;
      const uint32_t four = draw(of, stream, row + m * 16 + half * 8, key / 4 + pair);
      kept |= ((four & 3) | (four & 12) << 2) << (m * 16 + pair * 8 + half * 2);
    }
    return kept;
  }

  // Rows are keys, 2 kM neighbours a lane (sm80/bwd/bias_mask.cuh): bit 2 kM c + j is that of query
  // c and key j of a lane. query, key: the lane's first.
  template <int kM, int kN>
  __device__ __forceinline__ uint32_t draw_neighbours(const Seed& of, uint32_t stream, int query,
                                                      int key) const {
    static_assert(kM * kN <= 8, "one word");
    uint32_t kept = 0;
#pragma unroll 2
    for (int c = 0; c < 2 * kN; ++c) {
      uint32_t four = draw(of, stream, query + c / 2 * 8 + c % 2, key / 4);
      if (kM == 1) four = four >> (key & 2) & 3;
      kept |= four << 2 * kM * c;
    }
    return kept;
  }
};

// P of what is dropped becomes 0, blocks 8 word .. 8 word + 7.
template <int kM, int kN>
__device__ __forceinline__ void drop(float (&p)[kM][kN][4], int word, uint32_t kept) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int b = 8 * word + i / 4;
    if (b < kM * kN && !(kept >> i & 1)) p[b / kN][b % kN][i % 4] = 0.f;
  }
}

}  // namespace flashsci
