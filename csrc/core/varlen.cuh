// The rows that a CTA of a packed (varlen) launch works on, found on the device: the host does not
// know the lengths.
//
// Sequence n of N gets the slots cu[n] / kTile + n + 1 ... Slots of different sequences never
// collide, since floor(a / t) + ceil(l / t) <= floor((a + l) / t) + 1, and there are T / kTile + N
// + 2 of them: a launch needs neither the longest length nor a prefix sum. The rows before cu[0]
// and from cu[N] on belong to no sequence; they are segments 0 and N + 1, with no keys, so that
// their output is written. Offsets are clamped to [0, T] and lengths to >= 0: garbage in cu_seqlens
// never leaves the tensors.
#pragma once
#include <cstdint>

#include "../ptx/reduce.cuh"

namespace flashsci {

struct TileOfSequence {
  int tile;  // index of the query tile inside the segment; < 0 or past the end: nothing to do
  int first_q, seq_q;  // rows of the segment
  int first_k, seq_k;  // its keys
  int segment;         // 1 .. num_seqs; 0 and num_seqs + 1: rows of no sequence
};

// Begin of segment s in 0 .. num_seqs + 1 (and the end of the last one, at s = num_seqs + 2).
__device__ __forceinline__ int segment_begin(const int32_t* __restrict__ cu_seqlens,  // [N + 1]
                                             int segment, int num_seqs, int total) {
  if (segment <= 0) return 0;
  if (segment > num_seqs + 1) return total;
  return min(max(__ldg(cu_seqlens + segment - 1), 0), total);
}

template <int kTile>
__device__ __forceinline__ TileOfSequence find_tile(int slot, const int32_t* __restrict__ cu_q,
                                                    const int32_t* __restrict__ cu_k, int num_seqs,
                                                    int total_q, int total_k) {
  // 32-ary search for the last segment that starts at or before the slot: three loads deep for 32k.
  const int lane = threadIdx.x % 32;
  int low = 0, high = num_seqs + 2;
  while (high - low > 1) {
    const int step = (high - low + 31) / 32;
    const int probe = low + lane * step;
    const bool before =
        probe < high && segment_begin(cu_q, probe, num_seqs, total_q) / kTile + probe <= slot;
    const int count = max(__popc(__ballot_sync(0xffffffffu, before)), 1);
    low += (count - 1) * step;
    high = min(high, low + step);
  }
  TileOfSequence found;
  found.first_q = segment_begin(cu_q, low, num_seqs, total_q);
  found.seq_q = max(segment_begin(cu_q, low + 1, num_seqs, total_q) - found.first_q, 0);
  found.tile = slot - (found.first_q / kTile + low);
  const bool owned = low >= 1 && low <= num_seqs;
  found.first_k = owned ? segment_begin(cu_k, low, num_seqs, total_k) : 0;
  found.seq_k = owned ? max(segment_begin(cu_k, low + 1, num_seqs, total_k) - found.first_k, 0) : 0;
  // Tells the compiler that the value is the same in all lanes.
  found.tile = ptx::redux_max(found.tile);
  found.first_q = ptx::redux_max(found.first_q);
  found.seq_q = ptx::redux_max(found.seq_q);
  found.first_k = ptx::redux_max(found.first_k);
  found.seq_k = ptx::redux_max(found.seq_k);
  found.segment = ptx::redux_max(low);
  return found;
}

// Grid size of one head: the slots of packed rows, or the tiles of a dense call.
constexpr int64_t num_tiles(int64_t rows, int tile, int64_t num_seqs, bool packed) {
  return packed ? rows / tile + num_seqs + 2 : (rows + tile - 1) / tile;
}

}  // namespace flashsci
