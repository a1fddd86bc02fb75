// The warp that finds tiles and loads Q. Products with 8-bit caches take Q in fp16: a row of bf16
// numbers is brought into its range by a power of two.
#pragma once
#include <cstdint>

#include "../../ptx/convert.cuh"
#include "../../ptx/shared.cuh"
#include "config.cuh"

namespace flashsci::paged {

// The place of four columns of rows r and r + 8 of a tier of 16 rows, in the order of a product's
// operand of one lane: the first two of r, of r + 8, and the last two. Lanes that load together
// have no bank conflicts.
template <class C>
__device__ __forceinline__ uint32_t query_place(const unsigned char* tile, int tier, int r,
                                                int four) {
  const int swizzle = four / 8 % 4 | r % 2 * (C::kColumns / 32);
  return ptx::shared_address(tile) + ((tier * 8 + r) * (C::kHeadDim / 4) + (four ^ swizzle)) * 16;
}

// Converts pairs of bf16 to fp16 in units of the returned power of two, with the largest number of
// the row from 2^14 to 2^15: numbers down to 2^-31 of the largest keep all bits. kLanes lanes share
// a row. Inf and NaN are unchanged.
template <int kLanes>
__device__ __forceinline__ float to_f16(uint4& words) {
  uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
  int largest = 0;  // as bits
#pragma unroll
  for (const uint32_t pair : pairs)
    largest = max(largest, static_cast<int>(max(pair & 0x7fffu, pair >> 16 & 0x7fffu)));
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2)
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  // Exponents have an offset of 127. The inverse of the factor is a normal number, too.
  const int exponent = min(127 + 14 + 127 - (largest >> 7), 253);
  const float factor = __int_as_float(exponent << 23);
#pragma unroll
  for (uint32_t& pair : pairs)
    pair = ptx::cvt_f16x2(__uint_as_float(pair << 16) * factor,
                          __uint_as_float(pair & 0xffff0000u) * factor);
  words = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  return __int_as_float((254 - exponent) << 23);
}

// Publishes tile after tile: its place, its scales, and Q, with zeros past the head dim and in the
// padding rows that a warp computes. No row sees another, but all rows of a warp rescale together,
// so padding must be defined for the last bits of results to be reproducible. The computing warps
// do not wait where this warp waits, and the first rows are loaded before a stage is free for them.
template <class Op, class C>
__device__ __forceinline__ void load_queries(Storage<C>& shared, const Args& a, Cursor cursor) {
  constexpr int kLanes = C::kHeadDim / 8;               // per row
  constexpr int kTogether = C::kHeadDim == 64 ? 4 : 8;  // loads in flight per lane
  constexpr int kStep = kTogether * 32 / kLanes;        // rows per step
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (uint32_t turn = 0; !cursor.done(); ++turn) {
    const Slot slot = cursor.slot;
    const int rows = min(kRows, slot.seq_q * a.group - slot.first_row);
    const float k_scale = a.k_scale.at(slot.sequence, cursor.head);
    const float v_scale = a.v_scale.at(slot.sequence, cursor.head);
    const uint32_t stage = turn % C::kQStages;
#pragma unroll 1
    for (int first = 0; first < padded_rows(rows); first += kStep) {
      uint4 words[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int row = first + (i * 32 + lane) / kLanes, column = lane % kLanes * 8;
        const int pair = slot.first_row + row;
        const int64_t token = slot.first_q + pair / a.group;
        const int64_t head = cursor.head * a.group + pair % a.group;
        words[i] = make_uint4(0, 0, 0, 0);
        if (row < rows && column < a.p.head_dim)
          words[i] =
              __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.p.q) +
                                                   token * a.p.q_row + head * a.p.q_head + column));
      }
      if (first == 0) C::Isa::sleep(shared.q_empty[stage], (turn / C::kQStages & 1) ^ 1);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int row = first + (i * 32 + lane) / kLanes, column = lane % kLanes * 8;
        if constexpr (C::kBytes == 1 && Op::kIsBf16) {
          const float unit = to_f16<kLanes>(words[i]);
          if (column == 0) shared.q_units[stage][row] = unit;
        }
        const int half = row / 8 % 2;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t place = query_place<C>(shared.q[stage], row / 16, row % 8, column / 4 + j);
          ptx::st_shared(place + half * 4, j ? words[i].z : words[i].x);
          ptx::st_shared(place + half * 4 + 8, j ? words[i].w : words[i].y);
        }
      }
    }
    Tile tile = {slot, cursor.head, cursor.block, cursor.last, cursor.begin()};
    cursor.next_tile();
    tile.more = !cursor.done();
    if (lane == 0) {
      shared.tiles[stage] = tile;
      shared.k_scale[stage] = k_scale, shared.v_scale[stage] = v_scale;
    }
    C::Isa::arrive(shared.q_full[stage]);
  }
}

}  // namespace flashsci::paged
