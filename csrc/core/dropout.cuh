// Dropout: which probabilities stay, by Philox4x32-7 as a function of the seed and the position
// (flashsci.dropout_mask), as bits in the order of a lane's fragments.
//
// One draw serves eight neighbouring keys of a query, a row of a block of n8. Lanes that have parts
// of it share its draws: each makes some, and they exchange bytes.
#pragma once
#include <cstdint>

#include "../include/flashsci_dropout.h"
#include "../ptx/reduce.cuh"
#include "smem_tile.cuh"

namespace flashsci {

// The bit of element e of block b = m * kN + n of the accumulators, 8 blocks a word: a byte for each
// row of even and of odd blocks.
__device__ constexpr int bit_of_element(int b, int e) {
  return b % 2 * 16 + e / 2 * 8 + b / 2 % 4 * 2 + e % 2;
}

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
  uint32_t threshold;  // in the high half
  float scale;

  __device__ __forceinline__ explicit Dropping(const FlashsciDropout& p)
      : seed(p.seed), threshold(p.threshold << 16), scale(p.keep_scale) {}

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

  // Bits 8 d and 8 d + 1: whether keys 8 block + 2 d and + 2 d + 1 stay, d = 0 .. 3. stream: b *
  // heads_q + h.
  __device__ __forceinline__ uint32_t draw(const Seed& of, uint32_t stream, uint32_t row,
                                           uint32_t block) const {
    uint32_t x[4] = {of.offset, stream, row, block};
#pragma unroll
    for (uint32_t round = 0; round < 7; ++round) {
      const uint64_t first = uint64_t{0xD2511F53u} * x[0], second = uint64_t{0xCD9E8D57u} * x[2];
      x[0] = static_cast<uint32_t>(second >> 32) ^ x[1] ^ (of.key[0] + round * 0x9E3779B9u);
      x[1] = static_cast<uint32_t>(second);
      x[2] = static_cast<uint32_t>(first >> 32) ^ x[3] ^ (of.key[1] + round * 0xBB67AE85u);
      x[3] = static_cast<uint32_t>(first);
    }
    uint32_t kept = 0;
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      kept |= x[d] << 16 >= threshold ? 1u << 8 * d : 0u;
      kept |= x[d] >= threshold ? 2u << 8 * d : 0u;
    }
    return kept;
  }

  // Byte s: that of lane s of the quad which belongs to this lane, its byte lane % 4.
  __device__ __forceinline__ uint32_t exchange_in_quad(uint32_t own) const {
    const int lane = threadIdx.x;
    uint32_t other = __shfl_xor_sync(0xffffffffu, own, 1);
    own = __byte_perm(own, other, lane & 1 ? 0x3715 : 0x6240);
    other = __shfl_xor_sync(0xffffffffu, own, 2);
    return __byte_perm(own, other, lane & 2 ? 0x3276 : 0x5410);
  }

  // Blocks 8 word .. 8 word + 7, rows are queries. row: this lane's first; key: that of the warp's
  // first score, a multiple of 8. A lane draws one row of each second block.
  template <int kM, int kN>
  __device__ __forceinline__ uint32_t draw_rows(const Seed& of, int word, uint32_t stream, int row,
                                                int key) const {
    static_assert(kN % 2 == 0, "pairs of blocks");
    const int lane = threadIdx.x % 4;
    uint32_t own = 0;
#pragma unroll
    for (int t = 0; t < (kM * kN < 8 ? kM * kN : 8) / 2; ++t) {
      const int m = (8 * word + 2 * t) / kN, n = (8 * word + 2 * t) % kN + lane / 2;
      own |= draw(of, stream, row + m * 16 + lane % 2 * 8, key / 8 + n) << 2 * t;
    }
    return exchange_in_quad(own);
  }
  // The same with interleaved keys (smem_tile.cuh): a lane has all keys of its draws. key: that of
  // its first score.
  template <int kM, int kN>
  __device__ __forceinline__ uint32_t draw_interleaved_rows(const Seed& of, uint32_t stream,
                                                            int row, int key) const {
    static_assert(kM <= 2 && kN == 4, "one word");
    uint32_t kept = 0;
#pragma unroll 1
    for (int m = 0; m < kM; ++m) {
      uint32_t pairs[2];  // of blocks, of each row
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t eight = draw(of, stream, row + m * 16 + half * 8, key / 8);
        pairs[half] = eight | eight >> 14;
      }
      kept |= __byte_perm(pairs[0], pairs[1], 0x5140) << 4 * m;
    }
    return kept;
  }

  // Rows are keys, 4 neighbours a lane (sm80/bwd/bias_mask.cuh): bit 16 (c % 2) + 8 (j / 2) + 2 (c /
  // 2) + j % 2 is that of query c and key j of a lane. query, key: the lane's first. Of two lanes
  // that share eight keys, one draws the even queries, the other the odd ones.
  template <int kM, int kN>
  __device__ __forceinline__ uint32_t draw_neighbours(const Seed& of, uint32_t stream, int query,
                                                      int key) const {
    static_assert(kM == 2 && kN <= 4, "four keys, one word");
    const bool odd = threadIdx.x & 4;
    uint32_t own = 0;
#pragma unroll 2
    for (int n = 0; n < kN; ++n) own |= draw(of, stream, query + n * 8 + odd, key / 8) << 2 * n;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, own, 4);
    return __byte_perm(own, other, odd ? 0x3276 : 0x5410);
  }
};

// P of what is dropped becomes 0, blocks 8 word .. 8 word + 7.
template <int kM, int kN>
__device__ __forceinline__ void drop(float (&p)[kM][kN][4], int word, uint32_t kept) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int b = 8 * word + i / 4;
    if (b < kM * kN && !(kept >> bit_of_element(b, i % 4) & 1)) p[b / kN][b % kN][i % 4] = 0.f;
  }
}

}  // namespace flashsci
